from __future__ import annotations

import torch

from gmmvit_deploy.models.scores.attention import scaled_scores
from gmmvit_deploy.models.scores.masks import GaussianMixtureMask, stored_base


def test_scale_of_q_multiplies_q_and_nothing_else() -> None:
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    on_query = scaled_scores(0.3, scales_query=True)
    assert on_query.scales_query
    assert on_query(query, key).equal((query * 0.3) @ key.transpose(-2, -1))
    products = query @ key.transpose(-2, -1)
    assert on_query.masked(products).equal(products)
    assert not scaled_scores(0.3).scales_query
    assert scaled_scores(0.3)(query, key).equal(products * 0.3)


def test_oddities_name_head_and_kernel_and_nothing_in_a_sound_mask() -> None:
    alpha, sigma = torch.ones(2, 2, 1, 1), torch.ones(2, 2, 1, 1)
    assert list(GaussianMixtureMask(alpha, sigma, stored_base(2)).oddities()) == []
    alpha[1, 0], sigma[0, 1] = 0, 0.01
    oddities = [(odd.where, odd.what) for odd in GaussianMixtureMask(alpha, sigma, stored_base(2)).oddities()]
    assert oddities == [
        (" head 1 kernel 0", "sigma is 0.01: through this kernel a token attends only to itself"),
        (" head 0 kernel 1", "alpha is 0: the kernel has no effect"),
    ]

"""The names of tensors: files of transformers keep the names of older versions, which transformers itself translates.

    file      vit.encoder.layer.0.attention.attention.query.weight
    network   vit.layers.0.attention.q_proj.weight

The translation is that of transformers: this module has no list of names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from gmmvit_deploy.models.families.hugging_face.network import network_from_spec
from gmmvit_deploy.models.families.hugging_face.spec import HuggingFaceSpec

__all__ = ["names_in_network"]


def names_in_network(spec: HuggingFaceSpec, names: Iterable[str]) -> Mapping[str, str | None]:
    """Map each name in a file to the name in the network, as transformers does when it loads the file.

    A name that transformers does not know is mapped to itself. A tensor that transformers knows to be unused, such as
    an index that it computes from the sizes of the model, is mapped to None.
    """
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    with torch.device("meta"):
        network: Any = network_from_spec(spec)
    state = network.state_dict()
    transforms = get_model_conversion_mapping(network)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    unused = [re.compile(pattern) for pattern in network._keys_to_ignore_on_load_unexpected or ()]
    translated: dict[str, str | None] = {}
    for name in names:
        new, pattern = rename_source_key(name, renamings, converters, network.base_model_prefix, state)
        if new not in state:
            new, pattern = rename_source_key(name, [], [], network.base_model_prefix, state)
        if new in state and pattern is None:
            translated[name] = new
        else:
            translated[name] = None if any(p.search(new) or p.search(name) for p in unused) else name
    return translated

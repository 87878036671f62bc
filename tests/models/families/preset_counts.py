"""Trainable parameters of presets, for images of 224×224 (``deepvit_L_384``: 384×384) and 1000 classes."""

from __future__ import annotations

DEEPVIT = {
    "deepvit_patch16_224_re_attn_16b": 24_426_664,
    "deepvit_patch16_224_re_attn_24b": 36_261_448,
    "deepvit_patch16_224_re_attn_32b": 48_096_232,
    "deepvit_S": 27_312_632,
    "deepvit_L": 58_883_708,
    "deepvit_L_384": 59_043_308,
}
RMT = {
    "RMT_T3": 14_334_216,
    "RMT_S": 26_967_240,
    "RMT_M2": 54_154_896,
    "RMT_L6": 95_464_864,
    "RMT_T": 13_192_200,
    "RMT_S_2023": 25_701_064,
    "RMT_B": 52_689_680,
    "RMT_L": 93_844_512,
    "RMT_S_token_label": 27_480_240,
    "RMT_M2_token_label": 54_667_896,
    "RMT_L6_token_label": 96_105_864,
}

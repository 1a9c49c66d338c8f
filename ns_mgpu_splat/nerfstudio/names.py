# SPDX-License-Identifier: Apache-2.0
"""Nerfstudio's names of a splat table's columns, in the order of its optimizer groups."""

kColumnOf = {
    "means": "means",
    "scales": "scales",
    "quats": "quats",
    "features_dc": "sh0",
    "features_rest": "shN",
    "opacities": "opacities",
}

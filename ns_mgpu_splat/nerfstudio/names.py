# SPDX-License-Identifier: Apache-2.0
"""Words that several files here share: Nerfstudio's names of a splat table's columns, in the order of its optimizer groups."""

kColumnOf = {
    "means": "means",
    "scales": "scales",
    "quats": "quats",
    "features_dc": "sh0",
    "features_rest": "shN",
    "opacities": "opacities",
}

kNoLegacyViewer = (
    "--vis viewer_legacy shows no Gaussians. Leave it out: the usual viewer does (docs/viewer.md)."
)

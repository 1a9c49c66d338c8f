# SPDX-License-Identifier: Apache-2.0
"""Words that several files here share; of Nerfstudio: of the columns of a splat table, in the order of its optimizer groups."""

kColumnOf = {
    "means": "means",
    "scales": "scales",
    "quats": "quats",
    "features_dc": "sh0",
    "features_rest": "shN",
    "opacities": "opacities",
}

kModels = "nerfstudio_models"
"""Of a run's folder of checkpoints, unless it was given another name."""

kNoLegacyViewer = (
    "--vis viewer_legacy shows no Gaussians. Leave it out: the usual viewer does (docs/viewer.md)."
)

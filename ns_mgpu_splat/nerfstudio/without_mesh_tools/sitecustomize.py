# SPDX-License-Identifier: Apache-2.0
"""Not a part of the package: Python runs this at its start if this folder is on its path. See exporter.py."""

from ns_mgpu_splat.nerfstudio.exporter import make_mesh_tools_optional

make_mesh_tools_optional()

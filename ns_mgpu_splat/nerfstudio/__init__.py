# SPDX-License-Identifier: Apache-2.0
"""The Nerfstudio method `mgpu-splat`. Importing this builds and loads nothing native."""

# SPDX-License-Identifier: Apache-2.0
"""The partition: how space is cut, and which shard is home to which rows. Knows tables by their columns, not Nerfstudio."""

from ns_mgpu_splat.partition.grid import SparseGrid, grid_in_use, voxel_counts

__all__ = ["SparseGrid", "grid_in_use", "voxel_counts"]

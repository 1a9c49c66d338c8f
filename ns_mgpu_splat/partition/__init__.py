# SPDX-License-Identifier: Apache-2.0
"""The partition: how space is cut, and which shard is home to which rows. Knows tables by their columns, not Nerfstudio."""

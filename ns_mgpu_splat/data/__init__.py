# SPDX-License-Identifier: Apache-2.0
"""Captures on disk: reading, checking, caching; and the procedural city."""

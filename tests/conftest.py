# SPDX-License-Identifier: Apache-2.0
"""What all rooms' tests share."""

from __future__ import annotations

import signal

# A shell that starts a command in the background has it ignore Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# SPDX-License-Identifier: Apache-2.0
"""Puts the project root and tests/ on sys.path, so that `pytest` works from any folder without an install."""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

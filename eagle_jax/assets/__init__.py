"""The embedded pair: a small target that writes Python, its head, a smaller target.

All were trained on the source of Python's standard library (PSF licence, see
`LICENSE-PSF.txt`); `README.md` beside this file tells how.
"""

from pathlib import Path

TARGET = Path(__file__).parent / "target"
"""A Llama of 24 layers in Hugging Face layout."""

HEAD = Path(__file__).parent / "head"
"""Its EAGLE head, in the official layout."""

SMALL = Path(__file__).parent / "small"
"""A Llama of 2 layers with the same tokenizer."""

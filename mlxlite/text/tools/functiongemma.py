"""Calls between sentinels: FunctionGemma (spec 30 section 7).

    <start_function_call>call:add{a:1,town:<escape>Seoul<escape>}<end_function_call>

The grammar of Gemma 4 with other sentinels; a bare word is taken for a string, as this small model
forgets to escape.
"""

from __future__ import annotations

from mlxlite.text.tools.gemma4 import Gemma4, writing_of


class FunctionGemma(Gemma4):
    """See the module."""

    opener, closer, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    bare_text = True


WRITING = writing_of(FunctionGemma)

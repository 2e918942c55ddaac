"""API surfaces, one file each: parse a body into an Ask, render deltas and answers (floor 3).

Every surface has the same four parts: `parse_x`, `render_delta`, `render_whole` and the handler.
Surfaces do not import each other; what OpenAI's older two have in common is in `openai_shapes`.
"""

"""The text column: strings, messages and token ids; knows no tensor, no HTTP and no event loop.

    folder       the JSON files beside the weights
    tokenizer    text -> ids, and the exact bytes that each id stands for
    detokenizer  ids -> text, piece by piece, never splitting a character
    messages     what clients send -> what chat templates read
    sandbox      where the programs called chat templates run, bounded in time and size
    template     messages -> prompt text
    stops        finds stop strings in a stream of text
    tools/       finds tool calls in it, one file a family
    channels     finds a model's thinking in it
    sink         all of these in a row: ids -> what a client sees
    guides       the same between two steps of the engine
    fill/        what is known of a call before it is written

Files import only files above them in this list.
"""

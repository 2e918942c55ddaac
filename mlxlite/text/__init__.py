"""The text column: strings, messages and token ids; knows no tensor, no HTTP and no event loop.

    folder       the JSON files beside the weights
    tokenizer    text -> ids, and the exact bytes that each id stands for
    detokenizer  ids -> text, piece by piece, never splitting a character
    messages     what clients send -> what chat templates read
    template     messages -> prompt text
    stops        finds stop strings in a stream of text
    guides       the same between two steps of the engine

Files import only files above them in this list.
"""

"""Fill: tokens of a call that are known are put in without being decoded (spec 50).

plan        rows, proposals, limits: the vocabulary
compiler    template, tokenizer, tools → rows
plans       compiled rows, kept
guard       whether a row may fire here
echo        spans seen before, to be checked by the model
session     one row's history, its proposals and what became of them
trace       what happened, for diagnosis
guide       the guide that hands proposals to the engine
arm         whether a request is filled, and how
"""

"""Tool calls in a model's text, one file a family (spec 30 sections 3 to 7 under D11).

    format         what every family is: markers that open a block, a grammar that reads it
    repair         almost JSON -> JSON, in a fixed order of steps
    values         text of an XML-like parameter -> JSON value, by the tool's schema
    arguments      JSON arguments passed on as they come, and closed if they break
    router         finds blocks in a stream of text and runs their grammars
    hermes ... harmony   the families
    families       which family a model speaks, told by its chat template
    strict         one call, no repair: the guard of the fill session, family by family

Files import only files above them in this list.
"""

"""Tool calls in a model's text, one file a family (spec 30 sections 3 to 7 under D11).

    format         what every family is: markers that open a block, a grammar that reads it
    repair         almost JSON -> JSON, in a fixed order of steps
    values         text of an XML-like parameter -> JSON value, by the tool's schema
    arguments      JSON arguments passed on as they come, and closed if they break
    writing        the other way: a family's calls as rules of a grammar
    shapes         what a schema says, as far as such a grammar can follow it
    notation       values by a schema, in a family's own notation
    elements       calls of XML-like elements
    router         finds blocks in a stream of text and runs their grammars
    hermes ... harmony   the families
    watched        where a call that is held to a grammar begins
    families       which family a model speaks, told by its chat template
    strict         one call, no repair: the guard of the fill session, family by family

Files import only files above them in this list.
"""

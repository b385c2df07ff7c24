"""Drop-in replacements for the losses of other libraries: one module per library, evaluated by `pairproof.fast`.

A class has the name, the signature, the defaults and the peculiarities of the library's class. Where the library
deviates from the definition of the loss, a named option selects between them. Its default is the library's behaviour.

Each loss has the attribute ``evaluated_by``: "engine" if the last call was evaluated by the engine of `pairproof.fast`,
"plain" if it was evaluated by straightforward torch code. That code is used if the engine does not support the
configuration, rejects the values, or is slower for this size.
"""

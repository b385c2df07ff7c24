"""Drop-in replacements for the losses of other libraries, evaluated by `pairproof.fast`: one module per library.

A class has the name, signature, defaults and peculiarities of the library's class. Where the library deviates from the
definition of the loss, a named option selects between the two. The default is the library's behaviour.

The attribute ``evaluated_by`` of a loss says what evaluated the last call: "engine", the engine of `pairproof.fast`, or
"plain", straightforward torch code. It is empty before the first call. Plain code is used if the engine does not
support the configuration, rejects the values, or is slower for this size.
"""

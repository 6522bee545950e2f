"""Whether an operator keeps its contract: what is drawn, what is asked of it, how a failure is made small and shown.

======================================  ===============================================================================
modules                                 what they hold
======================================  ===============================================================================
the operator and the rules
``subject``                             what is checked: its arguments, its reference, what the dispatcher has of it
``prop`` ``properties/``                what a property is; all of them, one file a group
the search
``checking`` ``run`` ``budget``         :func:`opkit.check`, all properties as time allows
``search``                              one property: its first cases, then Hypothesis
``calls/``                              a call as data, and strategies for sizes, layouts, numbers, whole calls
what properties are made of
``observed/``                           what a call did; what it may depend on, and must leave as it was; threads
``compare/``                            the reference in float64, how near is near enough, what extremes leave open
``memory/``                             guard pages, red zones, fresh memory, leaks
``processes/``                          calls that crash, and first ones; properties beside each other
``traced/``                             fake tensors, symbolic sizes, compiled programs, gradients
what a person sees
``told/``                               text, HTML, JSON, progress, a script for each failure, docs/contract.md
``packages`` ``plugin`` ``strategies``  the operators of a package, pytest items, people's own tests
======================================  ===============================================================================
"""

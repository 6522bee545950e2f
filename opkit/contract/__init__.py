"""This package searches for arguments on which an operator breaks its contract, shrinks them, and reports them.

======================================  ===============================================================================
modules                                 contents
======================================  ===============================================================================
the operator and the rules
``subject``                             the operator under test: its arguments, reference and overload
``prop`` ``properties/``                the definition of a property; all properties, in groups
the search
``checking`` ``run`` ``budget``         :func:`opkit.check`: all properties, in the time that there is
``search``                              one property: its first cases, then Hypothesis
``calls/``                              a call as data, and strategies for sizes, layouts, numbers, whole calls
the parts of properties
``observed/``                           outcomes of calls, global state, random numbers, threads
``compare/``                            the reference in float64, tolerances, extreme numbers
``memory/``                             guard pages, red zones, fresh memory, leaks
``processes/``                          calls that crash, first calls, properties in parallel
``traced/``                             fake tensors, symbolic sizes, compiled programs, gradients
the output
``report/``                             text, HTML, JSON, progress, a script for each failure, docs/contract.md
``packages`` ``plugin`` ``strategies``  the operators of a package, pytest items, strategies for users' tests
======================================  ===============================================================================
"""

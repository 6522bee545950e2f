"""Whether an operator keeps its contract: what is drawn, what is asked of it, how a failure is made small and shown.

============================================  =========================================================================
modules                                       what they hold
============================================  =========================================================================
a call as data
``fills`` ``layouts`` ``cases``               what is in a tensor's memory, how it lies there, one call
``sizes`` ``specs`` ``sweep``                 strategies: joint sizes, tensors, whole calls; cases that come first
``inference`` ``arguments``                   specs from annotations or a schema; what tensors are called
``histories`` ``resizing`` ``incoming``       other calls around one, the same at other sizes, incoming gradients
the operator
``subject`` ``outcome`` ``snapshots``         what is checked, what a call of it did, and to its arguments
``randomness`` ``global_state`` ``devices``   what it may depend on, and what it must leave as it was
the search
``prop`` ``properties/``                      what a property is; all of them, one file a group
``search`` ``run`` ``budget`` ``checking``    one property, all of them as time allows, :func:`opkit.check`
comparisons
``exact`` ``tolerance`` ``special``           the reference in float64, how near is near enough, what extremes leave open
``compared`` ``rounding``                     results beside the reference's, and beside the operator's own
memory
``child`` ``wire`` ``crashes`` ``pristine``   calls in child processes: those that crash, and first ones
``guarded`` ``allocator`` ``heap`` ``poison``  guard pages, red zones, fresh memory, leaks
what torch makes of an operator
``fakes`` ``symbols`` ``graphs``              fake tensors, symbolic sizes, compiled programs
``derivatives`` ``directions``                gradients, finite differences
``concurrency``                               threads
what a person sees
``report`` ``page`` ``bar``                   text, HTML, JSON (``report_json``), progress
``repro`` ``source`` ``extraction``           a script for each failure; ``replaying`` is what it calls
``packages`` ``plugin`` ``strategies``        the operators of a package, pytest items, people's own tests
``document``                                  the tables of docs/contract.md
============================================  =========================================================================
"""

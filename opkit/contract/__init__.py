"""Whether an operator keeps its contract: what is drawn, what is asked of it, how a failure is made small and shown.

========================  =============================================================================================
module                    what it holds
========================  =============================================================================================
``fills`` ``layouts``     what is in a tensor's memory, and how the tensor lies in it
``cases``                 one call as data: it can be made again, compared, printed
``sizes`` ``specs``       strategies: joint sizes, tensors, whole calls
``inference``             specs from an operator's annotations or its schema
``subject`` ``outcome``   the operator under test, and what one call of it did
``prop``                  what a property is; ``properties/`` has them, one file a group
``search``                a property is tried on many cases, and the failure shrunk
``run`` ``budget``        all properties, in order, as time allows
``report`` ``page``       what was found, as text, as HTML and (``report_json``) as JSON
``bar``                   how far it is, on a terminal
``packages``              the operators of a module, for ``opkit check``
``plugin``                a pytest item for each property
``document``              the tables of docs/contract.md
``checking``              :func:`opkit.check`
========================  =============================================================================================
"""

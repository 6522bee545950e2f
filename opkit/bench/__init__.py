"""Benchmarks that are part of the package: ``opkit bench``.

==================  ===================================================================================================
modules             contents
==================  ===================================================================================================
``topics/``         what ``opkit bench run`` times, one file a topic; ``topics/__init__`` lists them
``figures``         runs of topics: measuring, the file, tables, the differences between two
``figures_page``    a run as an HTML page
``zoo/``            the architectures, one file a family; ``zoo/table.py`` lists them
``architecture``    what an architecture of the zoo is
``measurement``     one architecture and one backend, in a process of its own: ``python -m opkit.bench.measurement``
``accuracy``        errors against float64, and when they pass
``compilation``     what Dynamo and opkit's compiler did: graph breaks, recompiles, fallbacks
``timing``          interleaved run times, and peaks of memory
``jobs``            the processes, and the file of results that they add to
``results``         that file: reading it, totals, and the differences between two
``text``            results as text
``results_page``    results as an HTML page
``plots``           plots of speeds
==================  ===================================================================================================
"""

"""The one room for what is private to others: every private name of PyTorch and Triton that narrowcast uses.

One file per owner: ``dynamo``, ``functionalization``, ``autograd``, ``fsdp``, ``c10d``, ``triton``, ``gluon``. Each is
imported where it is used; this file imports none of them. :mod:`.private` records each name, and ``versions`` says
which releases of PyTorch, Triton and Python were tested.
"""

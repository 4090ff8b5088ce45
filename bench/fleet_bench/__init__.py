"""Benchmarks: a load generator for any OpenAI endpoint, the profile of a step, and the comparison with other runtimes.

Knows servers only as URLs and command lines; imports no room of the product.
"""

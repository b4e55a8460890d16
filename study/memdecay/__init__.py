"""The MemDecay study (arXiv 2607.10582): what is left of an agent's memory after a policy has evicted.

scenarios  twelve agents' contexts, three value variants each, in two lengths (tiers), with four planted facts
record     one run of the model over an episode: the attention each token got, compact and replayable (traces)
lifetimes  half-lives of regions, fitted from traces (Eqs. 6 and 7)
recall     evict to a budget by a policy's scores, then ask for the facts (Tables III and IV)
ablate     what the settings and the ideas beyond the paper change
overhead   a scored decode step beside an unscored one
"""

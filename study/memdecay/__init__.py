"""The MemDecay study (arXiv 2607.10582): what is left of an agent's memory after a policy has evicted.

scenarios  twelve agents' contexts, three value variants each, in two lengths (tiers), with four planted facts
record     one run of the model over an episode: the attention each token got, compact and replayable (traces)
evict      which tokens a policy keeps of a trace (Algorithm 1), observed as `protocol` says
recall     evict to a budget by a policy's scores, then ask for the facts (Tables III and IV)
tiered     the same questions to a daemon that demotes and recalls, in the same bytes
"""

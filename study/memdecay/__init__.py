"""The MemDecay study (arXiv 2607.10582): what is left of an agent's memory after a policy has evicted.

scenarios  twenty-four agents' contexts, three value variants each, in two lengths (tiers), with four planted facts
record     one run of the model over an episode: the attention each token got, compact and replayable (traces)
collect    such traces of all scenarios, or of real conversations, in a folder
lifetimes  how fast attention on a region fades (Eqs. 6 and 7); precision: what bfloat16 changes about it
ema_sweep  alpha and beta of the ema policy, by what share of the attention to come its hot set gets
evict      which tokens a policy keeps of a trace (Algorithm 1), observed as `protocol` says
ablate     one setting at a time; variants: ideas beyond the paper; labels: wrong regions (by survival of facts)
overhead   what observed attention costs a decode step
recall     evict to a budget by a policy's scores, then ask for the facts (Tables III and IV)
tiered     the same questions to a daemon that demotes and recalls, in the same bytes
"""

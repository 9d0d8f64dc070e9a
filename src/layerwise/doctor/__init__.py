"""Looking over an installation and a cluster before a run; docs/doctor.md says what each check means.

check    a finding: ok, warning or wrong, and what to do
facts    what one rank knows of itself: versions, device, network, data
words    texts from all ranks to all ranks
clock    how far the clocks of ranks are apart
folders  whether a folder is the same one everywhere
links    measured rates inside and between nodes
judge    from the facts of all ranks to findings
run      all of it, on ranks of its own or on those that torchrun started
"""

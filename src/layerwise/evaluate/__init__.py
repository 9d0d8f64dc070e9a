"""Strategies judged on one documented workload: table, sensitivity, pictures. All seconds are predictions; no torch.

workload     what is planned: cluster, model, mixture of lengths, read from YAML
steps        every strategy on one step; many steps on several processes
gaps         where the seconds above the ideal sit, by layer kind
table        the figures of each strategy over steps: means, intervals, worst step
sensitivity  the same figures with one setting of the workload changed
pictures     the same as pictures: interactive ones for a page, and files for papers
page         one HTML file that holds all of it
"""

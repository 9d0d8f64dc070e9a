"""What people look at: tables, pictures and one HTML page, of plans and of runs. No torch.

summary  a plan as plain rows, and as tables for a terminal
rows     numbers out of metrics rows
plots    pictures of plans and runs
profile  where the time of a few profiled steps went
page     one HTML file that tells what a few runs did
html     the page that every report is made of
"""

"""Every strategy on hosts with a slow link between them: exchanges are real, compute is paced by the cost model."""

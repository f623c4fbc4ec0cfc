"""What was spent and what may still be: accountants, calibration, the plan and the ledger."""

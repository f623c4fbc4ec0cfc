"""The errors that dpfl raises on purpose, one tree.

Every text says where, what was given, what is allowed and what to do. No text holds a private value
(a norm, loss, row count or record of a client): errors leave the client.
"""


class DpflError(Exception):
    """Base of every error that dpfl raises on purpose."""


class SettingsError(DpflError):
    """A setting is unknown, out of range, or does not go with others. Raised before any work."""


class DataError(DpflError):
    """A dataset is missing, unreadable or not of the declared shape."""


class ModelError(DpflError):
    """A model cannot be trained under the chosen privacy, with the layer's name and the way out."""


class AccountingError(DpflError):
    """An accountant cannot bound an event, or a target cannot be reached."""


class LedgerError(DpflError):
    """A ledger is missing, damaged, older than its checkpoint, or held by another process."""


class PrivacyError(DpflError):
    """Going on would break the stated guarantee, so the step was refused."""


class BudgetError(PrivacyError):
    """A node's own budget does not allow what was asked of it."""


class ProtocolError(DpflError):
    """A message does not have the promised form."""


class FederationError(DpflError):
    """Too few nodes, or no node that could answer."""

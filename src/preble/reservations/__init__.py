"""Placements for those who carry the bytes themselves and report from elsewhere: each with an id and a lease.

A carrier that dies reports nothing more; its placements end when their leases do.
"""

from preble.reservations.reservations import LONGEST_LEASE_S, ReservationHeld, Reservations
from preble.reservations.table import Reservation, ReservationTable, UnknownReservation

__all__ = [
    "LONGEST_LEASE_S",
    "Reservation",
    "ReservationHeld",
    "ReservationTable",
    "Reservations",
    "UnknownReservation",
]

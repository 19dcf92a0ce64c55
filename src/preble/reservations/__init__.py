"""Placements for those who carry the bytes themselves and report from elsewhere: each with an id and a lease.

A carrier that dies reports nothing more; its placements end when their leases do.
"""

from preble.reservations.reservations import LONGEST_LEASE_S as LONGEST_LEASE_S
from preble.reservations.reservations import ReservationHeld as ReservationHeld
from preble.reservations.reservations import Reservations as Reservations
from preble.reservations.table import Reservation as Reservation
from preble.reservations.table import ReservationTable as ReservationTable
from preble.reservations.table import UnknownReservation as UnknownReservation

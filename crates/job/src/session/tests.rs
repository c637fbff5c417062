//! behaviours

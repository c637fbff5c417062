//! How agents and their machines do.

use std::time::Duration;

use baton_job::message::{Beat, Gpu, Host, Vitals};

use super::Malformed;
use crate::v1;

impl From<Beat> for v1::Beat {
    fn from(Beat { number, round_trip, vitals }: Beat) -> Self {
        let (host, gpus) = match vitals {
            Some(Vitals { host, gpus }) => (Some(host), gpus),
            None => (None, Vec::new()),
        };
        Self {
            number,
            round_trip_seconds: round_trip.map(|time| time.as_secs_f64()),
            host: host.map(Into::into),
            gpus: gpus.into_iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<v1::Beat> for Beat {
    type Error = Malformed;

    fn try_from(wire: v1::Beat) -> Result<Self, Malformed> {
        let v1::Beat { number, round_trip_seconds, host, gpus } = wire;
        let round_trip = round_trip_seconds.map(Duration::try_from_secs_f64).transpose();
        let round_trip = round_trip
            .map_err(|error| Malformed::new("Beat", "round_trip_seconds", error.to_string()))?;
        let gpus = gpus.into_iter().map(Into::into).collect();
        let vitals = host.map(|host| Vitals { host: host.into(), gpus });
        Ok(Self { number, round_trip, vitals })
    }
}

/// Structs that have the same fields on both sides.
macro_rules! same_fields {
    ($name:ident { $($field:ident),+ $(,)? }) => {
        impl From<$name> for v1::$name {
            fn from($name { $($field),+ }: $name) -> Self {
                Self { $($field),+ }
            }
        }

        impl From<v1::$name> for $name {
            fn from(v1::$name { $($field),+ }: v1::$name) -> Self {
                Self { $($field),+ }
            }
        }
    };
}

same_fields!(Host {
    name,
    cpu,
    cpus,
    memory_used,
    memory_total,
    disk_free,
    disk_total,
    received_per_second,
    sent_per_second,
});

same_fields!(Gpu { index, name, uuid, utilisation, memory_used, memory_total, celsius, watts });

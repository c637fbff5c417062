//! The names of what is enumerated, as people and scripts read them.

use baton_proto::v1::{self, Extent, get_status_response::Phase, watch_events_response::Kind};

/// `training`, as people and scripts read it.
#[must_use]
pub fn phase_name(phase: Phase) -> String {
    word(phase.as_str_name(), "PHASE_")
}

/// `rank_failed`, as scripts read it.
#[must_use]
pub fn kind_name(kind: Kind) -> String {
    word(kind.as_str_name(), "KIND_")
}

/// `completed`, as scripts read it.
#[must_use]
pub fn outcome_name(kind: v1::outcome::Kind) -> String {
    word(kind.as_str_name(), "KIND_")
}

/// `full`, as scripts read it; none where it is not told.
#[must_use]
pub fn extent_name(extent: Extent) -> Option<String> {
    (extent != Extent::Unspecified).then(|| word(extent.as_str_name(), "EXTENT_"))
}

/// What [`extent_name`] wrote, read.
#[must_use]
pub(crate) fn extent_of(name: Option<&str>) -> Extent {
    let known = [Extent::Full, Extent::Subset];
    known.into_iter().find(|&extent| extent_name(extent).as_deref() == name).unwrap_or_default()
}

/// `computing`, as people and scripts read it.
#[must_use]
pub fn activity_name(activity: v1::Activity) -> String {
    word(activity.as_str_name(), "ACTIVITY_")
}

fn word(name: &str, prefix: &str) -> String {
    name.trim_start_matches(prefix).to_ascii_lowercase()
}

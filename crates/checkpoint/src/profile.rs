//! Profiles in the store: what the threads and the device of each rank did during some steps.
//!
//! Each rank writes one file, `profiles/NAME/rank-00000.json`, in [Chrome's trace format], which <https://ui.perfetto.dev>
//! opens. [`merge`] joins the files of all ranks. Machines' clocks differ; an all-reduce ends on all ranks at about the same
//! time, so the ends of those of the same steps tell by how much.
//!
//! [Chrome's trace format]: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

use std::{
    collections::BTreeMap,
    io::{self, BufWriter, Write as _},
    path::Path,
};

use baton_job::Rank;
use baton_recipe::Step;
use bytes::Bytes;
use object_store::PutMode;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{Error, Store, folder::write_whole, name::PROFILES};

/// Largest file of a rank, bytes.
const MAX_PROFILE_BYTES: u64 = 1 << 30;

/// Name of the span of a step, with the argument [`STEP_SPAN`].
pub const STEP_SPAN: &str = "step";
/// Name of the span in which a rank adds up gradients with the others.
pub const ALL_REDUCE_SPAN: &str = "all-reduce";

/// What one rank did: a trace that can be opened by itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankProfile {
    /// Its rank, and the steps in it.
    pub baton: ProfileInfo,
    /// The spans, in any order, and names of threads.
    #[serde(rename = "traceEvents")]
    pub events: Vec<TraceEvent>,
}

/// What a profile is of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfileInfo {
    /// The rank.
    pub rank: Rank,
    /// Name of its node: ranks of one node have the same clock.
    pub node: String,
    /// Time 0 of the events by that node's clock, nanoseconds since 1970-01-01 UTC.
    pub began_unix_nanos: u64,
    /// The first step in it.
    pub first_step: Step,
    /// The last step in it.
    pub last_step: Step,
    /// Spans that were left out because there were too many.
    pub left_out: u64,
    /// What is missing, and why; one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// An event of a trace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TraceEvent {
    /// What was done.
    pub name: String,
    /// Kind of event: `X` for a span, `M` for a name.
    pub ph: String,
    /// Group: `baton`, `op` for an operation of libtorch, `device` for the work of a GPU.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cat: String,
    /// Process: the rank.
    pub pid: u64,
    /// Thread, or stream of a GPU.
    pub tid: u64,
    /// Begin, microseconds.
    #[serde(default)]
    pub ts: f64,
    /// Duration, microseconds.
    #[serde(default)]
    pub dur: f64,
    /// Details.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub args: Map<String, Value>,
}

impl TraceEvent {
    /// The name of a thread or a stream.
    #[must_use]
    pub fn thread_name(pid: u64, tid: u64, name: &str) -> Self {
        Self { tid, ..Self::about("thread_name", pid, json!({ "name": name })) }
    }

    fn about(what: &str, pid: u64, args: Value) -> Self {
        let args = if let Value::Object(args) = args { args } else { Map::new() };
        Self { name: what.to_owned(), ph: "M".to_owned(), pid, args, ..Self::default() }
    }

    fn end(&self) -> f64 {
        self.ts + self.dur
    }

    fn is_span(&self, name: &str) -> bool {
        self.ph == "X" && self.name == name
    }
}

/// The trace of all ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MergedProfile {
    /// By how much each node's clock is ahead of the first rank's, microseconds; of nodes with an all-reduce in common with it.
    pub clock_offsets: BTreeMap<String, f64>,
    /// What each rank's profile is of.
    pub baton: Vec<ProfileInfo>,
    /// The spans and names of all ranks.
    #[serde(rename = "traceEvents")]
    pub events: Vec<TraceEvent>,
}

/// Where the time of a rank's steps went.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepShares {
    /// The rank.
    pub rank: Rank,
    /// Number of steps.
    pub steps: usize,
    /// Median duration of a step, seconds.
    pub seconds: f64,
    /// The parts of the step loop, the largest first.
    pub parts: Vec<StepPart>,
}

/// A part of the step loop.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepPart {
    /// Its name; `other` is what no span has.
    pub name: String,
    /// Its share of the steps' time, 0..1.
    pub share: f64,
}

impl RankProfile {
    /// Where the time of its steps went; `None` if it has no step.
    #[must_use]
    pub fn shares(&self) -> Option<StepShares> {
        let steps: Vec<&TraceEvent> = self.spans(STEP_SPAN).collect();
        let first = steps.first()?;
        let mut durations: Vec<f64> = steps.iter().map(|step| step.dur).collect();
        durations.sort_unstable_by(f64::total_cmp);
        let total: f64 = durations.iter().sum();
        // Those of the same thread that are in a step, and in no other part.
        let mut inner: Vec<&TraceEvent> = self
            .events
            .iter()
            .filter(|event| event.ph == "X" && event.cat == first.cat && event.tid == first.tid)
            .filter(|event| event.name != STEP_SPAN)
            .filter(|event| {
                steps.iter().any(|step| step.ts <= event.ts && event.end() <= step.end())
            })
            .collect();
        inner.sort_unstable_by(|a, b| a.ts.total_cmp(&b.ts).then(b.dur.total_cmp(&a.dur)));
        let mut parts: BTreeMap<&str, f64> = BTreeMap::new();
        let mut until = f64::MIN;
        for event in inner {
            if event.ts >= until {
                until = event.end();
                *parts.entry(&event.name).or_default() += event.dur / total;
            }
        }
        let other = 1.0 - parts.values().sum::<f64>();
        let part = |(name, share): (&str, f64)| StepPart { name: name.to_owned(), share };
        let mut parts: Vec<StepPart> =
            parts.into_iter().chain([("other", other)]).map(part).collect();
        parts.sort_unstable_by(|a, b| b.share.total_cmp(&a.share));
        let seconds = durations.get(durations.len() / 2)? / 1e6;
        Some(StepShares { rank: self.baton.rank, steps: steps.len(), seconds, parts })
    }

    fn spans<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a TraceEvent> {
        self.events.iter().filter(move |event| event.is_span(name))
    }

    /// The ends of the all-reduces in each step, microseconds since 1970.
    fn all_reduce_ends(&self) -> BTreeMap<u64, Vec<f64>> {
        let began = self.baton.began_unix_nanos as f64 / 1e3;
        let ends_in = |step: &TraceEvent| {
            let inside = |event: &&TraceEvent| step.ts <= event.ts && event.end() <= step.end();
            let mut ends: Vec<f64> = self
                .spans(ALL_REDUCE_SPAN)
                .filter(inside)
                .map(|event| began + event.end())
                .collect();
            ends.sort_unstable_by(f64::total_cmp);
            Some((step.args.get(STEP_SPAN)?.as_u64()?, ends))
        };
        self.spans(STEP_SPAN).filter_map(ends_in).collect()
    }

    /// By how much this rank's clock is ahead of that of `first`, microseconds: the median over their all-reduces, if they
    /// have any in common.
    fn clock_offset(&self, first: &Self) -> Option<f64> {
        let theirs = first.all_reduce_ends();
        let mut differences: Vec<f64> = Vec::new();
        for (step, ends) in self.all_reduce_ends() {
            let others = theirs.get(&step).filter(|others| others.len() == ends.len());
            let pairs = ends.iter().zip(others.into_iter().flatten());
            differences.extend(pairs.map(|(mine, theirs)| mine - theirs));
        }
        differences.sort_unstable_by(f64::total_cmp);
        differences.get(differences.len() / 2).copied()
    }
}

impl MergedProfile {
    /// Writes it as a file, which replaces an older one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, out: &Path) -> io::Result<()> {
        write_whole(
            out,
            |options, path| options.open(path),
            |file| {
                let mut writer = BufWriter::new(file);
                serde_json::to_writer(&mut writer, self)?;
                writer.flush()
            },
        )
    }
}

/// Joins the profiles of ranks into one trace, with the clock of the first one's node.
#[must_use]
pub fn merge(profiles: Vec<RankProfile>) -> MergedProfile {
    let mut clock_offsets: BTreeMap<String, f64> = BTreeMap::new();
    if let Some(first) = profiles.first() {
        clock_offsets.insert(first.baton.node.clone(), 0.0);
        for other in &profiles {
            let node = &other.baton.node;
            if !clock_offsets.contains_key(node)
                && let Some(offset) = other.clock_offset(first)
            {
                clock_offsets.insert(node.clone(), offset);
            }
        }
    }
    let start = |profile: &RankProfile| {
        let offset = clock_offsets.get(&profile.baton.node).copied().unwrap_or(0.0);
        profile.baton.began_unix_nanos as f64 / 1e3 - offset
    };
    let earliest = profiles.iter().map(start).fold(f64::INFINITY, f64::min);
    let mut events = Vec::new();
    for profile in &profiles {
        let (ProfileInfo { rank, node, .. }, pid) =
            (&profile.baton, u64::from(profile.baton.rank.0));
        let name = json!({ "name": format!("rank {rank} on {node}") });
        events.push(TraceEvent::about("process_name", pid, name));
        events.push(TraceEvent::about("process_sort_index", pid, json!({ "sort_index": pid })));
    }
    let mut infos = Vec::new();
    for profile in profiles {
        let shift = start(&profile) - earliest;
        events.extend(profile.events.into_iter().map(|event| match event.ph.as_str() {
            "X" => TraceEvent { ts: event.ts + shift, ..event },
            _ => event,
        }));
        infos.push(profile.baton);
    }
    MergedProfile { clock_offsets, baton: infos, events }
}

impl Store {
    /// Writes a rank's part of a profile.
    ///
    /// # Errors
    /// The store cannot be written, for example because the disk is full.
    pub fn write_profile(&self, name: &str, profile: &RankProfile) -> Result<(), Error> {
        let file = file_of(name, profile.baton.rank);
        let bytes = serde_json::to_vec(profile)
            .map_err(|error| Error::unusable(self.location(), error, "this is a bug"))?;
        self.write(&file, bytes.into(), PutMode::Overwrite)
    }

    /// The files that ranks have written of a profile, in the order of ranks; each is a [`RankProfile`] as JSON.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn profile_files(&self, name: &str) -> Result<Vec<String>, Error> {
        let files = self.files(&format!("{PROFILES}/{name}"))?;
        let mut paths: Vec<String> = files.iter().map(|file| file.location.to_string()).collect();
        paths.sort_unstable();
        Ok(paths)
    }

    /// The bytes of one of [`profile_files`](Self::profile_files).
    ///
    /// # Errors
    /// It is gone; the store cannot be read.
    pub fn read_profile_file(&self, file: &str) -> Result<Bytes, Error> {
        self.read(file, MAX_PROFILE_BYTES)?.ok_or_else(|| {
            Error::unusable(self.location(), format!("{file} is gone"), "record the profile again")
        })
    }
}

fn file_of(name: &str, rank: Rank) -> String {
    format!("{PROFILES}/{name}/rank-{:05}.json", rank.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(name: &str, tid: u64, ts: f64, dur: f64, args: Value) -> TraceEvent {
        let base = TraceEvent::about(name, 0, args);
        TraceEvent { ph: "X".to_owned(), cat: "baton".to_owned(), tid, ts, dur, ..base }
    }

    /// Two steps of 100 µs, each with 60 µs of gradient in which a wait of 10 µs is, and an all-reduce of 20 µs that ends
    /// with the step on another thread.
    fn profile(rank: u32, node: &str, began_unix_nanos: u64) -> RankProfile {
        let mut events = vec![span("decode", 9, 0.0, 300.0, json!({}))];
        for step in 0..2_u32 {
            let ts = 100.0 * f64::from(step);
            events.push(span("wait", 1, ts + 10.0, 10.0, json!({})));
            events.push(span("gradient", 1, ts + 10.0, 60.0, json!({})));
            events.push(span(ALL_REDUCE_SPAN, 2, ts + 80.0, 20.0, json!({})));
            events.push(span("update", 1, ts + 80.0, 5.0, json!({})));
            events.push(span(STEP_SPAN, 1, ts, 100.0, json!({ "step": 7 + step })));
        }
        let (first_step, last_step) = (Step(7), Step(8));
        let baton = ProfileInfo {
            rank: Rank(rank),
            node: node.to_owned(),
            began_unix_nanos,
            first_step,
            last_step,
            ..ProfileInfo::default()
        };
        RankProfile { baton, events }
    }

    const NOW: u64 = 1_790_000_000_000_000_000;

    #[test]
    fn the_clock_of_another_node_is_corrected_by_the_ends_of_all_reduces() {
        // The second node's clock is 3 s ahead, and its recording began 40 µs after the first rank's. All-reduces end
        // together: its steps are 40 µs earlier in its own time.
        let mut other = profile(1, "b", NOW + 3_000_040_000);
        other.events.iter_mut().for_each(|event| event.ts -= 40.0);
        let merged = merge(vec![profile(0, "a", NOW), other]);
        assert!((merged.clock_offsets["b"] - 3e6).abs() < 1.0, "{:?}", merged.clock_offsets);
        let ends = |pid: u64| -> Vec<f64> {
            let of_rank = |event: &&TraceEvent| event.pid == pid && event.is_span(ALL_REDUCE_SPAN);
            merged.events.iter().filter(of_rank).map(TraceEvent::end).collect()
        };
        // `profile` writes rank 0 as the process of all events.
        let all = ends(0);
        assert!((all[0] - all[2]).abs() < 1.0 && (all[1] - all[3]).abs() < 1.0, "{all:?}");
    }

    #[test]
    fn ranks_of_one_node_keep_their_clock() {
        let mut late = profile(1, "a", NOW);
        late.events.iter_mut().for_each(|event| event.ts += 5.0);
        let merged = merge(vec![profile(0, "a", NOW), late.clone()]);
        assert_eq!(merged.clock_offsets, [("a".to_owned(), 0.0)].into());
        assert!(merged.events.contains(&late.events[0]));
    }

    #[test]
    fn the_shares_of_a_step_are_those_of_the_outermost_parts_of_its_thread() {
        let shares = profile(3, "a", NOW).shares().unwrap();
        assert_eq!((shares.rank, shares.steps), (Rank(3), 2));
        assert!((shares.seconds - 1e-4).abs() < 1e-9);
        let parts =
            shares.parts.iter().map(|part| (part.name.as_str(), (part.share * 1e3).round()));
        let parts: Vec<(&str, f64)> = parts.collect();
        assert_eq!(parts, [("gradient", 600.0), ("other", 350.0), ("update", 50.0)]);
        assert_eq!(RankProfile::default().shares(), None);
    }

    #[test]
    fn what_ranks_write_is_read_in_the_order_of_ranks_and_is_no_checkpoint() {
        let store = Store::memory().unwrap();
        let written = [profile(11, "b", NOW), profile(2, "a", NOW)];
        written.iter().for_each(|profile| store.write_profile("x", profile).unwrap());
        let [second, first] = written;
        let read = |file: &String| serde_json::from_slice(&store.read_profile_file(file).unwrap());
        let files = store.profile_files("x").unwrap();
        let found: Vec<RankProfile> = files.iter().map(read).collect::<Result<_, _>>().unwrap();
        assert_eq!(found, [first, second]);
        assert_eq!(store.profile_files("y").unwrap(), Vec::<String>::new());
        assert_eq!(store.list().unwrap(), []);
    }
}

//! Positions of named tensors in flat regions, and conversion of values from one such layout to another.
//!
//! | layout | a tensor begins |
//! |---|---|
//! | 1 | where the previous tensor ends |
//! | 2 | at a multiple of [`ALIGNMENT`] values |
//!
//! A reader does not need the layout's number: the manifest gives the offset of each tensor, and a state with
//! another layout is loaded tensor by tensor, by name.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
};

use crate::{Float, TensorInfo};

/// Number of the newest layout.
const LAYOUT: u32 = 2;
/// Alignment of tensors, in values: 64 bytes of f32, the size of a cache line and of an AVX-512 register.
pub const ALIGNMENT: usize = 16;

/// Regions with the length and layout of another region: (region, other region).
const SAME_LAYOUT: [(&str, &str); 3] =
    [("momentum", "weights"), ("exp_avg", "weights"), ("exp_avg_sq", "weights")];
/// Moving averages, which also have the layout of another region and begin as copies of its values.
const AVERAGES: [(&str, &str); 2] = [("ema", "weights"), ("bn_running_ema", "bn_running")];

/// The region that holds the moving average of `region`, if there is one.
pub(crate) fn average_of(region: &str) -> Option<&'static str> {
    AVERAGES.iter().find(|(_, base)| *base == region).map(|(average, _)| *average)
}

/// The region whose tensors define the layout of `region`.
pub(crate) fn template(region: &str) -> &str {
    let pair = SAME_LAYOUT.iter().chain(&AVERAGES).find(|(name, _)| *name == region);
    pair.map_or(region, |(_, base)| base)
}

/// The regions of a state and the tensors in them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StateLayout {
    /// Every region.
    pub regions: Vec<FlatRegion>,
    /// The named tensors.
    pub tensors: Vec<TensorInfo>,
}

/// A region of values of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatRegion {
    /// Name, e.g. `weights`.
    pub name: String,
    /// Type of the values.
    pub float: Float,
    /// Number of values.
    pub len: usize,
    /// Whether training does not change it.
    pub frozen: bool,
}

impl FlatRegion {
    /// Number of 32-bit words.
    #[must_use]
    pub fn words(&self) -> usize {
        words(self.float, self.len)
    }
}

fn words(float: Float, values: usize) -> usize {
    (values * float.bytes()).div_ceil(4)
}

impl StateLayout {
    /// The number of the layout of `tensors`.
    #[must_use]
    pub fn version(tensors: &[TensorInfo]) -> u32 {
        let is_aligned = tensors.iter().all(|tensor| tensor.offset.is_multiple_of(ALIGNMENT));
        if is_aligned { LAYOUT } else { 1 }
    }

    pub(crate) fn region(&self, name: &str) -> Option<&FlatRegion> {
        self.regions.iter().find(|region| region.name == name)
    }

    /// The tensors in `region`, or in the region that defines its layout, sorted by offset.
    pub(crate) fn tensors_in(&self, region: &str) -> Vec<&TensorInfo> {
        let base = template(region);
        let mut tensors: Vec<_> =
            self.tensors.iter().filter(|tensor| tensor.region == base).collect();
        tensors.sort_by_key(|tensor| (tensor.offset, &tensor.name));
        tensors
    }
}

/// Maps the words of each region of a checkpoint to positions in a state. A word is 32 bits: one f32 or two
/// 16-bit values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayoutMapping {
    /// By source region, sorted by `start`.
    spans: BTreeMap<String, Vec<Span>>,
    is_identity: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct Span {
    /// First word in the checkpoint's region.
    start: usize,
    /// Number of words.
    len: usize,
    /// Target region in the state.
    to: String,
    /// First word in the target region.
    at: usize,
}

/// A contiguous range of words and its position in the state.
#[derive(Clone, Debug, PartialEq)]
pub struct MovedRange<'a> {
    /// Position in the requested slice, in words.
    pub from: Range<usize>,
    /// Target region in the state.
    pub region: &'a str,
    /// Position in the target region, in words.
    pub to: Range<usize>,
}

impl LayoutMapping {
    /// The mapping from a checkpoint with the layout `from` to a state with the layout `to`. State values that the
    /// checkpoint does not contain, namely optimizer moments of tensors that were frozen then, are left unchanged.
    ///
    /// # Errors
    /// The layouts belong to different models or optimizers: a description of every difference.
    pub fn between(from: &StateLayout, to: &StateLayout) -> Result<Self, Vec<String>> {
        let mut plan = Planner { from, to, spans: BTreeMap::new(), problems: Vec::new() };
        plan.compare_tensors();
        plan.map_regions();
        if !plan.problems.is_empty() {
            return Err(plan.problems);
        }
        let mut spans = plan.spans;
        spans.values_mut().for_each(merge);
        let is_whole = |region: &FlatRegion| {
            let whole = Span { start: 0, len: region.words(), to: region.name.clone(), at: 0 };
            spans.get(&region.name).map(Vec::as_slice) == Some(&[whole])
        };
        let is_identity = from.regions.len() == to.regions.len() && to.regions.iter().all(is_whole);
        Ok(Self { spans, is_identity })
    }

    /// Whether source and target positions are equal for all words.
    #[must_use]
    pub fn is_identity(&self) -> bool {
        self.is_identity
    }

    /// The target positions of the words `slice` of the checkpoint's `region`.
    pub fn parts(&self, region: &str, slice: Range<usize>) -> impl Iterator<Item = MovedRange<'_>> {
        let spans = self.spans.get(region).map(Vec::as_slice).unwrap_or_default();
        spans.iter().filter_map(move |span| {
            let start = span.start.max(slice.start);
            let end = (span.start + span.len).min(slice.end);
            (start < end).then(|| MovedRange {
                from: start - slice.start..end - slice.start,
                region: &span.to,
                to: span.at + (start - span.start)..span.at + (end - span.start),
            })
        })
    }
}

/// Merges adjacent spans.
fn merge(spans: &mut Vec<Span>) {
    spans.sort_by(|a, b| (a.start, &a.to).cmp(&(b.start, &b.to)));
    spans.dedup_by(|next, span| {
        let is_adjacent = next.to == span.to
            && next.start == span.start + span.len
            && next.at == span.at + span.len;
        if is_adjacent {
            span.len += next.len;
        }
        is_adjacent
    });
}

struct Planner<'a> {
    from: &'a StateLayout,
    to: &'a StateLayout,
    spans: BTreeMap<String, Vec<Span>>,
    problems: Vec<String>,
}

impl Planner<'_> {
    /// Compares names and shapes of the tensors.
    fn compare_tensors(&mut self) {
        let there: HashMap<&str, &TensorInfo> = by_name(self.from);
        for mine in &self.to.tensors {
            let name = &mine.name;
            match there.get(name.as_str()) {
                None => self.problems.push(format!("it has no {name} {:?}", mine.shape)),
                Some(theirs) if theirs.shape != mine.shape => {
                    let (theirs, mine) = (&theirs.shape, &mine.shape);
                    self.problems.push(format!("its {name} is {theirs:?}, not {mine:?}"));
                }
                Some(theirs) if theirs.channels_last != mine.channels_last => {
                    let order = if theirs.channels_last { "is" } else { "is not" };
                    self.problems.push(format!("its {name} {order} in channels-last order"));
                }
                Some(_) => {}
            }
        }
        let mine = by_name(self.to);
        let only_there = self.from.tensors.iter().filter(|t| !mine.contains_key(t.name.as_str()));
        let only_there = only_there.map(|t| format!("only it has {} {:?}", t.name, t.shape));
        self.problems.extend(only_there);
    }

    /// Finds the source of the values of each region.
    fn map_regions(&mut self) {
        let (from, to) = (self.from, self.to);
        let known: HashSet<&str> = to.regions.iter().map(|region| region.name.as_str()).collect();
        let others = from.regions.iter().filter(|region| !region.frozen);
        for region in others.filter(|region| !known.contains(region.name.as_str())) {
            self.problems.push(format!("only it has {}", region.name));
        }
        let there = by_name(from);
        for region in &to.regions {
            let counterpart = from.region(&region.name);
            if counterpart.is_none() && !region.frozen {
                self.problems.push(format!("it has no {}", region.name));
                continue;
            }
            let (mine, theirs) = (to.tensors_in(&region.name), from.tensors_in(&region.name));
            if counterpart == Some(region) && mine == theirs {
                self.spans.entry(region.name.clone()).or_default().push(Span {
                    start: 0,
                    len: region.words(),
                    to: region.name.clone(),
                    at: 0,
                });
                continue;
            }
            // If all tensors of a region have moved to other regions, an empty region is not a problem.
            if mine.is_empty() && (region.len > 0 || theirs.is_empty()) {
                let len = counterpart.map_or(0, |counterpart| counterpart.len);
                let name = &region.name;
                self.problems.push(format!("its {name} has {len} values, not {}", region.len));
            }
            for tensor in mine {
                // Missing tensors and other shapes have been reported already.
                let source = there.get(tensor.name.as_str());
                if let Some(source) = source.filter(|source| source.shape == tensor.shape) {
                    self.map_tensor(tensor, source, region);
                }
            }
        }
    }

    /// Finds the source of a tensor's values in `region`.
    fn map_tensor(&mut self, mine: &TensorInfo, theirs: &TensorInfo, region: &FlatRegion) {
        let base = template(&region.name);
        // The values themselves, or optimizer state or averages for each value.
        let source = if base == region.name || is_average(&region.name) && theirs.region != base {
            theirs.region.as_str()
        } else if theirs.region == base {
            region.name.as_str()
        } else {
            // The tensor was frozen, so it has no optimizer moments.
            return;
        };
        let Some(source) = self.from.region(source) else { return };
        if source.float != region.float {
            let (name, theirs, mine) = (&mine.name, source.float.dtype(), region.float.dtype());
            self.problems.push(format!("its {name} is {theirs:?}, not {mine:?}"));
            return;
        }
        let float = region.float;
        // If the length overflows, the span is reported below as outside its region.
        let len = words(float, mine.len().unwrap_or(usize::MAX / 8));
        let span = Span {
            start: words(float, theirs.offset),
            len,
            to: region.name.clone(),
            at: words(float, mine.offset),
        };
        if span.start + len > source.words() || span.at + len > region.words() {
            self.problems.push(format!("{} is outside region {}", mine.name, source.name));
            return;
        }
        self.spans.entry(source.name.clone()).or_default().push(span);
    }
}

fn is_average(region: &str) -> bool {
    AVERAGES.iter().any(|(average, _)| *average == region)
}

fn by_name(layout: &StateLayout) -> HashMap<&str, &TensorInfo> {
    layout.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect()
}

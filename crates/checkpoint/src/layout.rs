//! How named tensors lie in flat regions, and how values move from one such layout into another.
//!
//! | layout | a tensor begins |
//! |---|---|
//! | 1 | where the one before it ends |
//! | 2 | at a multiple of [`ALIGNMENT`] values |
//!
//! A reader needs no number: the manifest says where each tensor lies, and a state that is laid out otherwise
//! takes over tensor by tensor, by name.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
};

use crate::{Float, TensorInfo};

/// The newest layout.
const LAYOUT: u32 = 2;
/// Values at a multiple of which a tensor begins: 64 bytes of f32, a cache line and a register of AVX-512.
pub const ALIGNMENT: usize = 16;

/// Regions as long as another, in which tensors lie as in that one.
const ALIKE: [(&str, &str); 3] =
    [("momentum", "weights"), ("exp_avg", "weights"), ("exp_avg_sq", "weights")];
/// The same of moving averages, which begin as copies.
const AVERAGES: [(&str, &str); 2] = [("ema", "weights"), ("bn_running_ema", "bn_running")];

/// The region that holds the average of `region`, if one is kept.
pub(crate) fn average_of(region: &str) -> Option<&'static str> {
    AVERAGES.iter().find(|(_, of)| *of == region).map(|(average, _)| *average)
}

/// The region whose tensors tell where values lie in `region`.
pub(crate) fn template(region: &str) -> &str {
    let alike = ALIKE.iter().chain(&AVERAGES).find(|(alike, _)| *alike == region);
    alike.map_or(region, |(_, of)| of)
}

/// The regions of a state and the tensors in them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    /// Every region.
    pub regions: Vec<Flat>,
    /// The named tensors.
    pub tensors: Vec<TensorInfo>,
}

/// A region of values of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flat {
    /// Its name, e.g. `weights`.
    pub name: String,
    /// Its type.
    pub float: Float,
    /// Number of values.
    pub len: usize,
    /// Whether training leaves it as it is.
    pub frozen: bool,
}

impl Flat {
    /// Number of 32-bit words.
    #[must_use]
    pub fn words(&self) -> usize {
        words(self.float, self.len)
    }
}

fn words(float: Float, values: usize) -> usize {
    (values * float.bytes()).div_ceil(4)
}

impl Layout {
    /// The number of the layout in which `tensors` lie.
    #[must_use]
    pub fn version(tensors: &[TensorInfo]) -> u32 {
        let is_aligned = tensors.iter().all(|tensor| tensor.offset.is_multiple_of(ALIGNMENT));
        if is_aligned { LAYOUT } else { 1 }
    }

    pub(crate) fn region(&self, name: &str) -> Option<&Flat> {
        self.regions.iter().find(|region| region.name == name)
    }

    /// The tensors in `region`, or in the one that it is laid out like, in the order of their places.
    pub(crate) fn places(&self, region: &str) -> Vec<&TensorInfo> {
        let of = template(region);
        let mut tensors: Vec<_> =
            self.tensors.iter().filter(|tensor| tensor.region == of).collect();
        tensors.sort_by_key(|tensor| (tensor.offset, &tensor.name));
        tensors
    }
}

/// Where the words of each region of a checkpoint go in a state. A word is 32 bits: one f32 or two halves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moves {
    /// By the region that they come from, in the order of their beginnings there.
    spans: BTreeMap<String, Vec<Span>>,
    is_identity: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct Span {
    /// First word in the checkpoint's region.
    start: usize,
    len: usize,
    /// Region of the state.
    to: String,
    /// First word there.
    at: usize,
}

/// Words that stay together.
#[derive(Clone, Debug, PartialEq)]
pub struct Part<'a> {
    /// Where they lie in the slice that was asked about.
    pub from: Range<usize>,
    /// The region of the state that they belong to.
    pub region: &'a str,
    /// Where they belong in it.
    pub to: Range<usize>,
}

impl Moves {
    /// What moves a checkpoint that is laid out as `from` into a state that is laid out as `to`. Values that a
    /// checkpoint does not hold, the moments of what was frozen when it was written, stay as they are.
    ///
    /// # Errors
    /// They are the states of different models or optimizers: every difference, in words.
    pub fn between(from: &Layout, to: &Layout) -> Result<Self, Vec<String>> {
        let mut plan = Planner { from, to, spans: BTreeMap::new(), problems: Vec::new() };
        plan.tensors();
        plan.regions();
        if !plan.problems.is_empty() {
            return Err(plan.problems);
        }
        let mut spans = plan.spans;
        spans.values_mut().for_each(merge);
        let is_whole = |region: &Flat| {
            let whole = Span { start: 0, len: region.words(), to: region.name.clone(), at: 0 };
            spans.get(&region.name).map(Vec::as_slice) == Some(&[whole])
        };
        let is_identity = from.regions.len() == to.regions.len() && to.regions.iter().all(is_whole);
        Ok(Self { spans, is_identity })
    }

    /// Whether every word stays where it is.
    #[must_use]
    pub fn is_identity(&self) -> bool {
        self.is_identity
    }

    /// Where the words `slice` of the checkpoint's `region` go.
    pub fn parts(&self, region: &str, slice: Range<usize>) -> impl Iterator<Item = Part<'_>> {
        let spans = self.spans.get(region).map(Vec::as_slice).unwrap_or_default();
        spans.iter().filter_map(move |span| {
            let start = span.start.max(slice.start);
            let end = (span.start + span.len).min(slice.end);
            (start < end).then(|| Part {
                from: start - slice.start..end - slice.start,
                region: &span.to,
                to: span.at + (start - span.start)..span.at + (end - span.start),
            })
        })
    }
}

/// One span for what stays together.
fn merge(spans: &mut Vec<Span>) {
    spans.sort_by(|a, b| (a.start, &a.to).cmp(&(b.start, &b.to)));
    spans.dedup_by(|next, span| {
        let goes_on = next.to == span.to
            && next.start == span.start + span.len
            && next.at == span.at + span.len;
        if goes_on {
            span.len += next.len;
        }
        goes_on
    });
}

struct Planner<'a> {
    from: &'a Layout,
    to: &'a Layout,
    spans: BTreeMap<String, Vec<Span>>,
    problems: Vec<String>,
}

impl Planner<'_> {
    /// Compares the models.
    fn tensors(&mut self) {
        let there: HashMap<&str, &TensorInfo> = by_name(self.from);
        for mine in &self.to.tensors {
            let name = &mine.name;
            match there.get(name.as_str()) {
                None => self.problems.push(format!("it lacks {name} {:?}", mine.shape)),
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

    /// Finds out where each region's values come from.
    fn regions(&mut self) {
        let (from, to) = (self.from, self.to);
        let known: HashSet<&str> = to.regions.iter().map(|region| region.name.as_str()).collect();
        let others = from.regions.iter().filter(|region| !region.frozen);
        for region in others.filter(|region| !known.contains(region.name.as_str())) {
            self.problems.push(format!("only it has {}", region.name));
        }
        let there = by_name(from);
        for region in &to.regions {
            let twin = from.region(&region.name);
            if twin.is_none() && !region.frozen {
                self.problems.push(format!("it lacks {}", region.name));
                continue;
            }
            let (mine, theirs) = (to.places(&region.name), from.places(&region.name));
            if twin == Some(region) && mine == theirs {
                self.spans.entry(region.name.clone()).or_default().push(Span {
                    start: 0,
                    len: region.words(),
                    to: region.name.clone(),
                    at: 0,
                });
                continue;
            }
            // All that is left of a region may be elsewhere by now.
            if mine.is_empty() && (region.len > 0 || theirs.is_empty()) {
                let len = twin.map_or(0, |twin| twin.len);
                let name = &region.name;
                self.problems.push(format!("its {name} has {len} values, not {}", region.len));
            }
            for tensor in mine {
                // Those that are not there, or of another shape, are named already.
                let source = there.get(tensor.name.as_str());
                if let Some(source) = source.filter(|source| source.shape == tensor.shape) {
                    self.tensor(tensor, source, region);
                }
            }
        }
    }

    /// Finds out where a tensor's values in `region` come from.
    fn tensor(&mut self, mine: &TensorInfo, theirs: &TensorInfo, region: &Flat) {
        let of = template(&region.name);
        // The values themselves, or what the optimizer keeps of each.
        let source = if of == region.name || is_average(&region.name) && theirs.region != of {
            theirs.region.as_str()
        } else if theirs.region == of {
            region.name.as_str()
        } else {
            // It was frozen, and has no moments.
            return;
        };
        let Some(source) = self.from.region(source) else { return };
        if source.float != region.float {
            let (name, theirs, mine) = (&mine.name, source.float.dtype(), region.float.dtype());
            self.problems.push(format!("its {name} is {theirs:?}, not {mine:?}"));
            return;
        }
        let float = region.float;
        let len = words(float, mine.len().unwrap_or(usize::MAX / 8));
        let span = Span {
            start: words(float, theirs.offset),
            len,
            to: region.name.clone(),
            at: words(float, mine.offset),
        };
        if span.start + len > source.words() || span.at + len > region.words() {
            self.problems.push(format!("{} does not lie in {}", mine.name, source.name));
            return;
        }
        self.spans.entry(source.name.clone()).or_default().push(span);
    }
}

fn is_average(region: &str) -> bool {
    AVERAGES.iter().any(|(average, _)| *average == region)
}

fn by_name(layout: &Layout) -> HashMap<&str, &TensorInfo> {
    layout.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect()
}

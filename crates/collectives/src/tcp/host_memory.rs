//! A rank's host memory during an all-reduce: the regions of a [schedule](crate::schedule) as slices.

use baton_job::Rank;
use bytemuck::{cast_slice, cast_slice_mut};

use super::mesh::Message;
use crate::schedule::{Additions, PeerTransfer, RankMemory, SumRegion, SumStage};
use crate::{Error, operation, tree};

/// Number of values added at a time: 32 KiB of each term, so that blocks stay in the cache while a value is part of
/// several additions.
const BLOCK_LEN: usize = 8 << 10;

/// The memory that regions refer to.
pub(super) struct HostMemory<'a> {
    /// This rank's partial sums.
    pub(super) sums: Vec<&'a mut [f32]>,
    /// What other ranks send.
    pub(super) received: &'a mut [f32],
}

impl HostMemory<'_> {
    /// The messages of `stage`.
    pub(super) fn messages(&mut self, stage: &SumStage) -> Result<Vec<Message<'_>>, Error> {
        let regions = stage.transfers.values().flat_map(|transfer| &transfer.receive);
        let (received, rest) = self.split(&regions.collect::<Vec<_>>())?;
        let mut received = received.into_iter();
        let message = |(peer, transfer): (&Rank, &PeerTransfer)| {
            let send = transfer.send.iter().map(|region| Ok(cast_slice(rest.get(region)?)));
            let receive = received.by_ref().take(transfer.receive.len()).map(cast_slice_mut);
            Ok(Message {
                peer: *peer,
                send: Some(send.collect::<Result<_, Error>>()?),
                receive: Some(receive.collect()),
            })
        };
        stage.transfers.iter().map(message).collect()
    }

    /// Adds up.
    pub(super) fn add(&mut self, additions: &Additions) -> Result<(), Error> {
        let (mut terms, _) = self.split(&additions.terms.iter().collect::<Vec<_>>())?;
        let len = terms.first().map_or(0, |term| term.len());
        for start in (0..len).step_by(BLOCK_LEN) {
            let block = start..len.min(start + BLOCK_LEN);
            for &(left, right) in &additions.pairs {
                let [left, right] = two_of(&mut terms, left, right)?;
                tree::add(&mut left[block.clone()], &right[block.clone()]);
            }
            if let Some(to) = additions.copy_first_to {
                let [to, first] = two_of(&mut terms, to, 0)?;
                to[block.clone()].copy_from_slice(&first[block]);
            }
        }
        Ok(())
    }

    /// The slices of `regions`, which must not overlap, and what is left between them.
    fn split(&mut self, regions: &[&SumRegion]) -> Result<(Vec<&mut [f32]>, Rest<'_>), Error> {
        let mut in_order: Vec<usize> =
            (0..regions.len()).filter(|index| !regions[*index].range.is_empty()).collect();
        in_order
            .sort_unstable_by_key(|index| (regions[*index].memory, regions[*index].range.start));
        let mut in_order = in_order.into_iter().peekable();
        let mut slices: Vec<&mut [f32]> = regions.iter().map(|_| Default::default()).collect();
        let mut rest = Vec::new();
        let sums = (0..).map(RankMemory::Sum).zip(self.sums.iter_mut().map(|sum| &mut **sum));
        for (memory, mut values) in sums.chain([(RankMemory::Received, &mut *self.received)]) {
            let mut at = 0;
            while let Some(index) = in_order.next_if(|index| regions[*index].memory == memory) {
                let range = &regions[index].range;
                let before = range.start.checked_sub(at).ok_or_else(wrong)?;
                let (before, after) = values.split_at_mut_checked(before).ok_or_else(wrong)?;
                let (slice, after) = after.split_at_mut_checked(range.len()).ok_or_else(wrong)?;
                rest.push((memory, at, &*before));
                slices[index] = slice;
                (at, values) = (range.end, after);
            }
            rest.push((memory, at, &*values));
        }
        match in_order.next() {
            None => Ok((slices, Rest(rest))),
            Some(_) => Err(wrong()),
        }
    }
}

fn two_of<'t, 'm>(
    terms: &'t mut [&'m mut [f32]],
    left: usize,
    right: usize,
) -> Result<[&'t mut &'m mut [f32]; 2], Error> {
    terms.get_disjoint_mut([left, right]).map_err(|_| wrong())
}

/// Memory in pieces, in ascending order: which memory, from which value on.
struct Rest<'a>(Vec<(RankMemory, usize, &'a [f32])>);

impl<'a> Rest<'a> {
    /// The slice of `region`, which must be within one piece.
    fn get(&self, region: &SumRegion) -> Result<&'a [f32], Error> {
        let SumRegion { memory, range } = region;
        let after =
            self.0.partition_point(|(piece, start, _)| (piece, start) <= (memory, &range.start));
        let piece = after.checked_sub(1).and_then(|index| self.0.get(index));
        let (piece, start, values) = piece.ok_or_else(wrong)?;
        let range = range.start.checked_sub(*start).zip(range.end.checked_sub(*start));
        let values = range.filter(|_| piece == memory).and_then(|(from, to)| values.get(from..to));
        values.ok_or_else(wrong)
    }
}

/// A schedule names a region that is not there, or one twice.
fn wrong() -> Error {
    let detail = "the schedule does not fit the memory; this is a bug in Baton, please report it";
    Error::Protocol { operation: operation::ALL_REDUCE, detail: detail.to_owned() }
}

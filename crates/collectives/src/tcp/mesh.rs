//! The connections of a group, and message exchange over all of them at the same time.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::iter;
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Once;

use baton_job::Rank;
use baton_job::message::MAX_UNREACHED;
use rustix::event::PollFlags;

use super::connection::PeerConnection;
use super::shared_memory::{self, MemoryOffer, OfferedMemory, SharedRings};
use super::wait::{AbortSignal, OperationContext};
use super::wire::{MessageHeader, MessageKind};
use crate::Error;

/// One connection to every other rank.
#[derive(Debug)]
pub(super) struct Mesh {
    pub(super) rank: Rank,
    pub(super) abort_signal: AbortSignal,
    /// Indexed by rank; `None` for this rank, and for all when they are closed.
    connections: Vec<Option<PeerConnection>>,
    /// Number of exchanges so far.
    sequence: u64,
}

/// A message to send to one peer, and a buffer for the one to receive from it.
#[derive(Debug)]
pub(super) struct Message<'a> {
    pub(super) peer: Rank,
    /// The pieces of one message.
    pub(super) send: Option<Vec<&'a [u8]>>,
    /// Together, they must have the length of the message.
    pub(super) receive: Option<Vec<&'a mut [u8]>>,
}

impl Mesh {
    pub(super) fn new(
        rank: Rank,
        abort_signal: AbortSignal,
        streams: Vec<Option<TcpStream>>,
    ) -> Self {
        let connections =
            streams.into_iter().map(|stream| stream.map(PeerConnection::new)).collect();
        Self { rank, abort_signal, connections, sequence: 0 }
    }

    pub(super) fn world_size(&self) -> u32 {
        self.connections.len() as u32
    }

    /// Ends all connections.
    pub(super) fn close(&mut self) {
        self.connections.fill_with(|| None);
    }

    /// All other ranks.
    pub(super) fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let me = self.rank;
        (0..self.world_size()).map(Rank).filter(move |rank| *rank != me)
    }

    /// Sends and receives all `messages`, in both directions of all connections at the same time, so that ranks that
    /// all start with sending do not block each other.
    pub(super) fn exchange(
        &mut self,
        context: &OperationContext<'_>,
        kind: MessageKind,
        argument: u32,
        messages: Vec<Message<'_>>,
    ) -> Result<(), Error> {
        let sequence = self.sequence;
        self.sequence += 1;
        let header = |length| MessageHeader::new(sequence, kind, argument, length);
        let mut connections: Vec<_> = self.connections.iter_mut().map(Option::as_mut).collect();
        let mut transfers = Vec::new();
        for Message { peer, send, receive } in messages {
            let Some(connection) = connections[peer.0 as usize].take() else { continue };
            let outgoing = send.map(|pieces| Outgoing::new(header, pieces));
            let incoming = receive.map(|pieces| Incoming::new(header, pieces));
            transfers.push(Transfer { peer, connection, outgoing, incoming });
        }
        loop {
            let mut must_wait = true;
            for transfer in &mut transfers {
                must_wait &= transfer.advance_shared(context.operation)?;
            }
            transfers.retain(|transfer| !transfer.is_done());
            if transfers.is_empty() {
                return Ok(());
            }
            if !must_wait {
                context.check()?;
                continue;
            }
            let sockets: Vec<_> = transfers.iter().map(Transfer::interest).collect();
            let peers = || transfers.iter().map(|at| at.peer).take(MAX_UNREACHED).collect();
            let ready = context.wait(&sockets, &peers)?;
            for (transfer, ready) in transfers.iter_mut().zip(ready) {
                if ready {
                    transfer.connection.woken();
                    transfer.advance(context.operation)?;
                }
            }
        }
    }

    /// From now on this rank and those of `machine`, which has it too, exchange through memory that they share; where that
    /// cannot be, through TCP as before. All ranks of the group must call this, even if they share with nobody.
    pub(super) fn share_memory(
        &mut self,
        context: &OperationContext<'_>,
        machine: Range<u32>,
    ) -> Result<(), Error> {
        let me = self.rank;
        let capacity = shared_memory::capacity(machine.len().saturating_sub(1));
        let (lower, higher) = (machine.start..me.0, me.0 + 1..machine.end);
        // The lower rank of two makes the memory.
        let made: Vec<_> = higher.clone().map(|_| OfferedMemory::create(capacity)).collect();
        let offer = |made: &io::Result<OfferedMemory>| match made {
            Ok(made) => made.offer().encode(),
            Err(_) => MemoryOffer::default().encode(),
        };
        let offers: Vec<_> = made.iter().map(offer).collect();
        let mut received = vec![[0; MemoryOffer::SIZE]; lower.len()];
        self.pass_on(context, (higher.clone(), &offers), (lower.clone(), &mut received))?;

        let open = |offer| SharedRings::open(MemoryOffer::decode(offer), capacity);
        let opened: Vec<_> = received.iter().map(open).collect();
        let answers: Vec<_> = opened.iter().map(|opened| [u8::from(opened.is_ok())]).collect();
        let mut accepted = vec![[0]; higher.len()];
        self.pass_on(context, (lower.clone(), &answers), (higher.clone(), &mut accepted))?;

        let accepted = iter::zip(made, accepted).map(|(made, answer)| {
            let made = made?;
            match answer {
                [1] => Ok(made.accepted()),
                _ => Err(io::Error::other("the other rank cannot open it")),
            }
        });
        for (peer, rings) in lower.zip(opened).chain(higher.zip(accepted)) {
            match (rings, &mut self.connections[peer as usize]) {
                (Ok(rings), Some(connection)) => connection.share(rings),
                (Ok(_), None) => {}
                (Err(error), _) => warn_once(Rank(peer), &error),
            }
        }
        Ok(())
    }

    /// Sends some ranks what each of them shall get, and receives what others send.
    fn pass_on<const SENT: usize, const RECEIVED: usize>(
        &mut self,
        context: &OperationContext<'_>,
        (to, sent): (Range<u32>, &[[u8; SENT]]),
        (from, received): (Range<u32>, &mut [[u8; RECEIVED]]),
    ) -> Result<(), Error> {
        let sends = to.zip(sent).map(|(peer, bytes)| (peer, Some(vec![&bytes[..]]), None));
        let receives = from.zip(received).map(|(peer, to)| (peer, None, Some(vec![&mut to[..]])));
        let messages = sends.chain(receives).map(|(peer, send, receive)| Message {
            peer: Rank(peer),
            send,
            receive,
        });
        self.exchange(context, MessageKind::ShareMemory, 0, messages.collect())
    }
}

/// The remaining work with one peer.
struct Transfer<'a> {
    peer: Rank,
    connection: &'a mut PeerConnection,
    outgoing: Option<Outgoing<'a>>,
    incoming: Option<Incoming<'a>>,
}

impl<'a> Transfer<'a> {
    fn is_done(&self) -> bool {
        self.outgoing.is_none() && self.incoming.is_none()
    }

    fn interest(&self) -> (BorrowedFd<'_>, PollFlags) {
        self.connection.interest(self.outgoing.is_some(), self.incoming.is_some())
    }

    /// Moves bytes through shared memory; returns whether the socket must be ready for more.
    fn advance_shared(&mut self, operation: &'static str) -> Result<bool, Error> {
        if !self.connection.is_shared() {
            return Ok(true);
        }
        self.advance(operation)?;
        let must_wait = self.connection.must_wait(self.outgoing.is_some(), self.incoming.is_some());
        must_wait.map_err(|source| Error::LostPeer { rank: self.peer, operation, source })
    }

    /// Moves as many bytes as possible without waiting.
    fn advance(&mut self, operation: &'static str) -> Result<(), Error> {
        let rank = self.peer;
        let lost = |source| Error::LostPeer { rank, operation, source };
        if let Some(outgoing) = &mut self.outgoing
            && outgoing.write(self.connection).map_err(lost)?
        {
            self.outgoing = None;
        }
        if let Some(incoming) = &mut self.incoming {
            let complete = incoming.read(self.connection).map_err(lost)?;
            if let Some(got) = incoming.unexpected_header() {
                let expected = incoming.expected;
                let detail = format!("rank {rank} sent {got}, expected {expected}");
                return Err(Error::Protocol { operation, detail });
            }
            if complete {
                self.incoming = None;
            }
        }
        Ok(())
    }
}

/// A message that is being sent.
struct Outgoing<'a> {
    header: [u8; MessageHeader::SIZE],
    pieces: Vec<&'a [u8]>,
    /// Number of bytes sent, of header and pieces.
    sent: usize,
}

impl<'a> Outgoing<'a> {
    fn new(header: impl Fn(usize) -> MessageHeader, pieces: Vec<&'a [u8]>) -> Self {
        let length = pieces.iter().map(|piece| piece.len()).sum();
        Self { header: header(length).encode(), pieces, sent: 0 }
    }

    /// Writes once; returns whether the message is complete.
    fn write(&mut self, connection: &mut PeerConnection) -> io::Result<bool> {
        let mut slices = vec![IoSlice::new(&self.header)];
        slices.extend(self.pieces.iter().map(|piece| IoSlice::new(piece)));
        let mut unsent = &mut slices[..];
        IoSlice::advance_slices(&mut unsent, self.sent);
        let written = connection.write(unsent)?;
        let total: usize = unsent.iter().map(|slice| slice.len()).sum();
        self.sent += written;
        Ok(written == total)
    }
}

/// A message that is being received.
struct Incoming<'a> {
    expected: MessageHeader,
    header: [u8; MessageHeader::SIZE],
    /// Number of bytes of the header received.
    header_received: usize,
    /// What is not filled yet.
    pieces: VecDeque<&'a mut [u8]>,
}

impl<'a> Incoming<'a> {
    fn new(header: impl FnOnce(usize) -> MessageHeader, pieces: Vec<&'a mut [u8]>) -> Self {
        let expected = header(pieces.iter().map(|piece| piece.len()).sum());
        let header = [0; MessageHeader::SIZE];
        Self { expected, header, header_received: 0, pieces: pieces.into() }
    }

    /// The header, if it has arrived and is not the expected one.
    fn unexpected_header(&self) -> Option<MessageHeader> {
        let header = MessageHeader::decode(&self.header);
        (self.header_received == MessageHeader::SIZE && header != self.expected).then_some(header)
    }

    /// Reads what is available, at first only up to the end of the header; returns whether the message is complete.
    fn read(&mut self, connection: &mut PeerConnection) -> io::Result<bool> {
        while self.header_received < MessageHeader::SIZE {
            match connection.read(&mut self.header[self.header_received..])? {
                None => return Ok(false),
                Some(count) => self.header_received += count,
            }
            if self.unexpected_header().is_some() {
                return Ok(false);
            }
        }
        while let Some(piece) = self.pieces.front_mut() {
            if piece.is_empty() {
                self.pieces.pop_front();
                continue;
            }
            match connection.read(piece)? {
                None => return Ok(false),
                Some(count) => *piece = &mut std::mem::take(piece)[count..],
            }
        }
        Ok(true)
    }
}

/// Says once in this process that ranks of one machine share no memory.
fn warn_once(peer: Rank, error: &io::Error) {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            %peer,
            %error,
            "ranks of this machine exchange gradients over TCP: they cannot share memory, which is a little faster and \
             needs one PID namespace and one user for all of them; later ones are not logged"
        );
    });
}

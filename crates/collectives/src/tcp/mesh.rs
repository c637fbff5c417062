//! The connections of a group, and message exchange over all of them at the same time.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use baton_job::Rank;
use baton_job::message::MAX_UNREACHED;
use rustix::event::PollFlags;

use super::wait::{AbortSignal, OperationContext};
use super::wire::{MessageHeader, MessageKind};
use crate::Error;

/// One connection to every other rank.
#[derive(Debug)]
pub(super) struct Mesh {
    pub(super) rank: Rank,
    pub(super) abort_signal: AbortSignal,
    /// Indexed by rank; `None` for this rank, and for all when they are closed. Non-blocking.
    streams: Vec<Option<TcpStream>>,
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
        Self { rank, abort_signal, streams, sequence: 0 }
    }

    pub(super) fn world_size(&self) -> u32 {
        self.streams.len() as u32
    }

    /// Ends all connections.
    pub(super) fn close(&mut self) {
        self.streams.fill_with(|| None);
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
        let mut transfers = Vec::new();
        for Message { peer, send, receive } in messages {
            let Some(stream) = &self.streams[peer.0 as usize] else { continue };
            let outgoing = send.map(|pieces| Outgoing::new(header, pieces));
            let incoming = receive.map(|pieces| Incoming::new(header, pieces));
            transfers.push(Transfer { peer, stream, outgoing, incoming });
        }
        loop {
            transfers.retain(|transfer| !transfer.is_done());
            if transfers.is_empty() {
                return Ok(());
            }
            let sockets: Vec<_> = transfers.iter().map(Transfer::interest).collect();
            let peers = || transfers.iter().map(|at| at.peer).take(MAX_UNREACHED).collect();
            let ready = context.wait(&sockets, &peers)?;
            for (transfer, ready) in transfers.iter_mut().zip(ready) {
                if ready {
                    transfer.advance(context.operation)?;
                }
            }
        }
    }
}

/// The remaining work with one peer.
struct Transfer<'a> {
    peer: Rank,
    stream: &'a TcpStream,
    outgoing: Option<Outgoing<'a>>,
    incoming: Option<Incoming<'a>>,
}

impl<'a> Transfer<'a> {
    fn is_done(&self) -> bool {
        self.outgoing.is_none() && self.incoming.is_none()
    }

    fn interest(&self) -> (BorrowedFd<'a>, PollFlags) {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::OUT, self.outgoing.is_some());
        flags.set(PollFlags::IN, self.incoming.is_some());
        (self.stream.as_fd(), flags)
    }

    /// Moves as many bytes as possible without waiting.
    fn advance(&mut self, operation: &'static str) -> Result<(), Error> {
        let rank = self.peer;
        let lost = |source| Error::LostPeer { rank, operation, source };
        if let Some(outgoing) = &mut self.outgoing
            && outgoing.write(self.stream).map_err(lost)?
        {
            self.outgoing = None;
        }
        if let Some(incoming) = &mut self.incoming {
            let complete = incoming.read(self.stream).map_err(lost)?;
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
    fn write(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        let mut slices = vec![IoSlice::new(&self.header)];
        slices.extend(self.pieces.iter().map(|piece| IoSlice::new(piece)));
        let mut unsent = &mut slices[..];
        IoSlice::advance_slices(&mut unsent, self.sent);
        let written = now_or_later(stream.write_vectored(unsent))?;
        let total: usize = unsent.iter().map(|slice| slice.len()).sum();
        self.sent += written.unwrap_or(0);
        Ok(written == Some(total))
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
    fn read(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        while self.header_received < MessageHeader::SIZE {
            match now_or_later(stream.read(&mut self.header[self.header_received..]))? {
                None => return Ok(false),
                Some(0) => return Err(closed()),
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
            match now_or_later(stream.read(piece))? {
                None => return Ok(false),
                Some(0) => return Err(closed()),
                Some(count) => *piece = &mut std::mem::take(piece)[count..],
            }
        }
        Ok(true)
    }
}

/// Converts a read or write that would block to `None`.
pub(super) fn now_or_later(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
            _ => Err(error),
        },
    }
}

/// The peer ended the connection.
pub(super) fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "connection closed by peer")
}

//! The connections of a group, and exchanging messages over all of them at once.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use baton_job::Rank;
use rustix::event::PollFlags;

use super::wait::{Alarm, Limit};
use super::wire::{Header, Kind};
use crate::Error;

/// One connection to every other rank.
#[derive(Debug)]
pub(super) struct Mesh {
    pub(super) rank: Rank,
    pub(super) alarm: Alarm,
    /// By rank; none to oneself. They do not block.
    streams: Vec<Option<TcpStream>>,
    /// Number of exchanges so far.
    sequence: u64,
}

/// What goes to one peer, and where to put what comes from it.
#[derive(Debug)]
pub(super) struct Message<'a> {
    pub(super) peer: Rank,
    /// The pieces of one message.
    pub(super) send: Option<Vec<&'a [u8]>>,
    /// As long as the message must be.
    pub(super) receive: Option<&'a mut [u8]>,
}

impl Mesh {
    pub(super) fn new(rank: Rank, alarm: Alarm, streams: Vec<Option<TcpStream>>) -> Self {
        Self { rank, alarm, streams, sequence: 0 }
    }

    pub(super) fn world_size(&self) -> u32 {
        self.streams.len() as u32
    }

    /// Everybody else.
    pub(super) fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let me = self.rank;
        (0..self.world_size()).map(Rank).filter(move |rank| *rank != me)
    }

    /// Sends and receives all `messages`, in both directions of all connections at the same time,
    /// so that ranks that all send first never wait for each other.
    pub(super) fn exchange(
        &mut self,
        limit: &Limit<'_>,
        kind: Kind,
        argument: u32,
        messages: Vec<Message<'_>>,
    ) -> Result<(), Error> {
        let sequence = self.sequence;
        self.sequence += 1;
        let header = |length| Header::new(sequence, kind, argument, length);
        let mut transfers = Vec::new();
        for Message { peer, send, receive } in messages {
            let Some(stream) = &self.streams[peer.0 as usize] else { continue };
            let outgoing = send.map(|pieces| Outgoing::new(header, pieces));
            let incoming = receive.map(|body| Incoming::new(header(body.len()), body));
            transfers.push(Transfer { peer, stream, outgoing, incoming });
        }
        loop {
            transfers.retain(|transfer| !transfer.is_done());
            let Some(first) = transfers.first() else { return Ok(()) };
            let sockets: Vec<_> = transfers.iter().map(Transfer::interest).collect();
            let ready = limit.wait(&sockets, first.peer)?;
            for (transfer, ready) in transfers.iter_mut().zip(ready) {
                if ready {
                    transfer.advance(limit.operation)?;
                }
            }
        }
    }
}

/// What is left to do with one peer.
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

    /// Moves as much as the connection takes and gives right now.
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
                let detail = format!("rank {rank} sends {got}, expected {expected}");
                return Err(Error::Protocol { operation, detail });
            }
            if complete {
                self.incoming = None;
            }
        }
        Ok(())
    }
}

/// A message on its way out.
struct Outgoing<'a> {
    header: [u8; Header::SIZE],
    pieces: Vec<&'a [u8]>,
    /// Bytes sent, of header and pieces.
    sent: usize,
}

impl<'a> Outgoing<'a> {
    fn new(header: impl Fn(usize) -> Header, pieces: Vec<&'a [u8]>) -> Self {
        let length = pieces.iter().map(|piece| piece.len()).sum();
        Self { header: header(length).encode(), pieces, sent: 0 }
    }

    /// Writes once; whether the message is complete.
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

/// A message on its way in.
struct Incoming<'a> {
    expected: Header,
    header: [u8; Header::SIZE],
    body: &'a mut [u8],
    /// Bytes received, of header and body.
    received: usize,
}

impl<'a> Incoming<'a> {
    fn new(expected: Header, body: &'a mut [u8]) -> Self {
        Self { expected, header: [0; Header::SIZE], body, received: 0 }
    }

    /// The header, if it has come and is not the right one.
    fn unexpected_header(&self) -> Option<Header> {
        let header = Header::decode(&self.header);
        (self.received >= Header::SIZE && header != self.expected).then_some(header)
    }

    /// Reads until the connection has no more or, first, up to the end of the header; whether the
    /// message is complete.
    fn read(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        loop {
            let rest = match self.received.checked_sub(Header::SIZE) {
                None => &mut self.header[self.received..],
                Some(start) => &mut self.body[start..],
            };
            if rest.is_empty() {
                return Ok(true);
            }
            match now_or_later(stream.read(rest))? {
                None => return Ok(false),
                Some(0) => return Err(closed()),
                Some(count) => self.received += count,
            }
        }
    }
}

/// A read or write that would have to wait is none.
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

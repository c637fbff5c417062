//! A connection to one other rank: a socket, and memory beside it if both are on one machine.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::PollFlags;

use super::shared_memory::SharedRings;

/// A connection. Nothing here waits.
#[derive(Debug)]
pub(super) struct PeerConnection {
    /// Non-blocking.
    socket: TcpStream,
    shared: Option<SharedRings>,
    /// Whether the peer has left. What it has written into shared memory before can still be read.
    is_closed: bool,
}

impl PeerConnection {
    pub(super) fn new(socket: TcpStream) -> Self {
        Self { socket, shared: None, is_closed: false }
    }

    /// From now on bytes go through `rings`; the socket only wakes the peer. Nothing else may be on its way.
    pub(super) fn share(&mut self, rings: SharedRings) {
        self.shared = Some(rings);
    }

    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Writes what can be written now; returns how many bytes.
    pub(super) fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(rings) = &mut self.shared else {
            return now_or_later(self.socket.write_vectored(slices)).map(Option::unwrap_or_default);
        };
        if self.is_closed {
            return Err(closed());
        }
        let mut total = 0;
        for slice in slices {
            let written = rings.write(slice, || wake(&self.socket))?;
            total += written;
            if written < slice.len() {
                break;
            }
        }
        Ok(total)
    }

    /// Reads what can be read now; returns how many bytes, or `None` if there is nothing yet.
    pub(super) fn read(&mut self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        let Some(rings) = &mut self.shared else {
            let count = now_or_later(self.socket.read(bytes))?;
            return if count == Some(0) { Err(closed()) } else { Ok(count) };
        };
        match rings.read(bytes, || wake(&self.socket))? {
            0 if self.is_closed => Err(closed()),
            count => Ok((count > 0).then_some(count)),
        }
    }

    /// What to wait for in order to send and to receive.
    pub(super) fn interest(&self, sends: bool, receives: bool) -> (BorrowedFd<'_>, PollFlags) {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::OUT, sends && !self.is_shared());
        flags.set(PollFlags::IN, receives || self.is_shared());
        (self.socket.as_fd(), flags)
    }

    /// Whether to wait for the socket; otherwise bytes can be moved at once.
    pub(super) fn must_wait(&self, sends: bool, receives: bool) -> io::Result<bool> {
        match &self.shared {
            Some(rings) => Ok(!self.is_closed && rings.may_sleep(sends, receives)?),
            None => Ok(true),
        }
    }

    /// The socket is ready: takes what has woken this rank off it.
    pub(super) fn woken(&mut self) {
        let mut wakeups = [0; 64];
        while self.is_shared() && !self.is_closed {
            match now_or_later(self.socket.read(&mut wakeups)) {
                Ok(None) => break,
                Ok(Some(0)) | Err(_) => self.is_closed = true,
                Ok(Some(_)) => {}
            }
        }
    }
}

/// Wakes the peer. It needs no more if the socket is full, and has left if there is an error, which the next read finds.
fn wake(mut socket: &TcpStream) {
    let _ = socket.write(&[0]);
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use rustix::event::{PollFd, poll};

    use super::super::shared_memory::{self, OfferedMemory};
    use super::*;

    #[test]
    fn what_a_peer_wrote_before_it_left_can_be_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (there, _) = listener.accept().unwrap();
        let capacity = shared_memory::capacity(1);
        let made = OfferedMemory::create(capacity).unwrap();
        let opened = SharedRings::open(made.offer(), capacity).unwrap();
        let [mut here, mut there] =
            [(here, made.accepted()), (there, opened)].map(|(socket, rings)| {
                socket.set_nonblocking(true).unwrap();
                let mut connection = PeerConnection::new(socket);
                connection.share(rings);
                connection
            });
        // A wake-up that nobody takes: the system resets the connection when its socket is closed.
        wake(&here.socket);
        assert!(here.must_wait(false, true).unwrap());
        assert_eq!(there.write(&[IoSlice::new(b"last"), IoSlice::new(b" words")]).unwrap(), 10);
        drop(there);

        while !here.is_closed {
            let (socket, flags) = here.interest(false, true);
            poll(&mut [PollFd::from_borrowed_fd(socket, flags)], None).unwrap();
            here.woken();
        }
        let mut words = [0; 10];
        assert_eq!(here.read(&mut words).unwrap(), Some(10));
        assert_eq!(&words, b"last words");
        assert_eq!(here.read(&mut words).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        let late = here.write(&[IoSlice::new(b"late")]).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::UnexpectedEof);
        assert!(!here.must_wait(true, true).unwrap(), "nobody will wake this rank");
    }
}

//! Faulty connections, written by hand because a correct rank does not make them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use rustix::net::{AddressFamily, SocketType, bind, socket};

use super::proof::{ConnectionEnd, OPENING_BYTES, Opening, PROOF_BYTES, open, prove};
use super::wire::{MessageHeader, PROTOCOL, RankHello};
use super::*;
use crate::TreeNode;

const LONG: Duration = Duration::from_secs(60);
const OPTIONS: TcpOptions = TcpOptions { connect_timeout: LONG, operation_timeout: LONG };

fn secret() -> MeshSecret {
    MeshSecret::new([7; MeshSecret::BYTES])
}

/// Rank 0 of 2 in generation 2, not connected yet; the test plays rank 1.
fn rank_0(
    options: TcpOptions,
    abort: AbortHandle,
) -> (String, impl FnOnce() -> Result<TcpCollective, Error> + Send) {
    let listener = Listener::bind("127.0.0.1").unwrap();
    let address = listener.address().to_owned();
    // Rank 0 makes no outgoing connections, so the address of rank 1 does not matter.
    let peers = [address.clone(), String::new()];
    let connect = move || {
        let (generation, rank, secret) = (Generation(2), Rank(0), &secret());
        let group = RankGroup { generation, rank, peers: &peers, secret };
        TcpCollective::connect(listener, group, options, abort)
    };
    (address, connect)
}

fn rank_1(rank_0: &str, generation: u64) -> Result<TcpCollective, Error> {
    rank_1_with(&secret(), rank_0, generation)
}

fn rank_1_with(secret: &MeshSecret, rank_0: &str, generation: u64) -> Result<TcpCollective, Error> {
    let listener = Listener::bind("127.0.0.1").unwrap();
    let peers = &[rank_0.to_owned(), listener.address().to_owned()];
    let group = RankGroup { generation: Generation(generation), rank: Rank(1), peers, secret };
    TcpCollective::connect(listener, group, OPTIONS, AbortHandle::new())
}

const RANK_1: Membership =
    Membership { protocol: PROTOCOL, generation: Generation(2), rank: Rank(1), world_size: 2 };
const RANK_0: Membership = Membership { rank: Rank(0), ..RANK_1 };

/// What a side sends before the first message.
type Handshake = (Opening, [u8; PROOF_BYTES]);

/// Sends rank 1's opening to rank 0 and reads the answer.
fn opened(rank_0: &str, opening: &Opening) -> (TcpStream, Handshake) {
    let mut stream = TcpStream::connect(rank_0).unwrap();
    stream.write_all(opening).unwrap();
    let (mut theirs, mut proof) = ([0; OPENING_BYTES], [0; PROOF_BYTES]);
    stream.read_exact(&mut theirs).unwrap();
    stream.read_exact(&mut proof).unwrap();
    assert_eq!(theirs.first_chunk().and_then(RankHello::decode).unwrap().from, RANK_0);
    (stream, (theirs, proof))
}

/// A connection on which the other side sends nothing more and that it has closed.
fn assert_is_closed(mut stream: TcpStream) {
    stream.set_read_timeout(Some(LONG)).unwrap();
    match stream.read(&mut [0]) {
        Ok(0) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        other => panic!("not closed: {other:?}"),
    }
}

/// Rank 0 connects with the true rank 1, after all that came before.
fn assert_they_meet(
    address: &str,
    rank_0: std::thread::ScopedJoinHandle<'_, Result<TcpCollective, Error>>,
) {
    let mut second = rank_1(address, 2).unwrap();
    let mut first = rank_0.join().unwrap().unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(move || second.all_gather_bytes(b"one").unwrap());
        let gathered = first.all_gather_bytes(b"zero").unwrap();
        assert_eq!(gathered, [b"zero".to_vec(), b"one".to_vec()]);
        assert_eq!(other.join().unwrap(), gathered);
    });
}

/// A hand-written connection of rank 1.
fn rank_1_by_hand(rank_0: &str) -> TcpStream {
    let mine = open(RankHello { from: RANK_1, to: Rank(0) }).unwrap();
    let (mut stream, (theirs, _)) = opened(rank_0, &mine);
    let proof = prove(&secret(), ConnectionEnd::Connecting, &mine, &theirs);
    stream.write_all(proof.as_bytes()).unwrap();
    stream
}

/// Rank 0 of 2 adds up `values` with rank 1's.
fn all_reduce(rank_0: &mut TcpCollective, values: &mut [f32]) -> Result<(), Error> {
    let part = Part { node: TreeNode::leaf(0), buffer: BufferMut::Host(values) };
    rank_0.all_reduce(2, &mut [part])
}

#[test]
fn garbage_silence_and_stale_generations_do_not_disturb_the_handshake() {
    let (address, connect) = rank_0(OPTIONS, AbortHandle::new());
    std::thread::scope(|scope| {
        let connected = scope.spawn(connect);
        let _silent = TcpStream::connect(&address).unwrap();
        let mut garbage = TcpStream::connect(&address).unwrap();
        garbage.write_all(&[0xff; 4096]).unwrap();
        drop(TcpStream::connect(&address).unwrap());

        let refused = rank_1(&address, 1).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "connect: expected rank 0 of 2 in generation 1 (protocol 4), found rank 0 of 2 in \
             generation 2 (protocol 4); wait for the coordinator's next generation"
        );

        assert_they_meet(&address, connected);
    });
}

#[test]
fn a_connection_that_does_not_know_the_secret_takes_no_ranks_place() {
    let (address, connect) = rank_0(OPTIONS, AbortHandle::new());
    std::thread::scope(|scope| {
        let connected = scope.spawn(connect);
        let mine = open(RankHello { from: RANK_1, to: Rank(0) }).unwrap();
        let (mut silent, _) = opened(&address, &mine);
        let (mut guessing, (theirs, proof)) = opened(&address, &mine);
        let other_secret = MeshSecret::new([8; MeshSecret::BYTES]);
        let guess = prove(&other_secret, ConnectionEnd::Connecting, &mine, &theirs);
        guessing.write_all(guess.as_bytes()).unwrap();
        assert_is_closed(guessing);
        // Sends rank 0's own proof back to it.
        let (mut mirroring, _) = opened(&address, &mine);
        mirroring.write_all(&proof).unwrap();
        assert_is_closed(mirroring);

        assert_they_meet(&address, connected);
        silent.write_all(&[0; PROOF_BYTES]).ok();
    });
}

#[test]
fn a_recorded_handshake_cannot_be_replayed() {
    let mine = open(RankHello { from: RANK_1, to: Rank(0) }).unwrap();
    let (address, connect) = rank_0(OPTIONS, AbortHandle::new());
    let recorded = std::thread::scope(|scope| {
        let connected = scope.spawn(connect);
        let (mut stream, (theirs, _)) = opened(&address, &mine);
        let proof = prove(&secret(), ConnectionEnd::Connecting, &mine, &theirs);
        stream.write_all(proof.as_bytes()).unwrap();
        connected.join().unwrap().unwrap();
        proof
    });

    // The same rank of the same generation, with the same secret.
    let (address, connect) = rank_0(OPTIONS, AbortHandle::new());
    std::thread::scope(|scope| {
        let connected = scope.spawn(connect);
        let (mut replaying, _) = opened(&address, &mine);
        replaying.write_all(recorded.as_bytes()).unwrap();
        assert_is_closed(replaying);
        assert_they_meet(&address, connected);
    });
}

#[test]
fn a_process_that_took_a_ranks_port_gets_no_connection() {
    let (address, connect) = rank_0(OPTIONS, AbortHandle::new());
    let refused = std::thread::scope(|scope| {
        scope.spawn(connect);
        let other_secret = MeshSecret::new([8; MeshSecret::BYTES]);
        let refused = rank_1_with(&other_secret, &address, 2).unwrap_err();
        drop(rank_1(&address, 2).unwrap());
        refused
    });
    assert!(matches!(refused, Error::Impostor { rank: Rank(0) }), "{refused}");
    assert!(refused.to_string().contains("does not know the generation's secret"), "{refused}");
}

#[test]
fn ranks_do_not_connect_without_a_secret() {
    let refused = rank_1_with(&MeshSecret::default(), "127.0.0.1:1", 2).unwrap_err();
    assert_eq!(refused.to_string(), "connect: the coordinator has sent no secret for the ranks");
}

#[test]
fn a_handshake_can_be_aborted() {
    let abort = AbortHandle::new();
    let (_, connect) = rank_0(OPTIONS, abort.clone());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(connect);
        abort.abort();
        let aborted = waiting.join().unwrap();
        assert!(matches!(aborted, Err(Error::Aborted { operation: "connect" })), "{aborted:?}");
    });
}

#[test]
fn a_handshake_has_a_deadline_even_if_a_silent_connection_stays_open() {
    let options = TcpOptions { connect_timeout: Duration::from_millis(30), ..OPTIONS };
    let (address, connect) = rank_0(options, AbortHandle::new());
    let _silent = TcpStream::connect(address).unwrap();
    let late = connect().unwrap_err();
    assert_eq!(late.to_string(), "connect: timed out after 30ms, waiting for rank 1");
}

/// Its error would hide that of the others, which names the ranks that do not reach each other.
#[test]
fn a_rank_that_is_connected_waits_for_others_that_still_connect() {
    let options = TcpOptions {
        connect_timeout: Duration::from_secs(1),
        operation_timeout: Duration::from_millis(500),
    };
    let listeners = [(); 3].map(|()| Listener::bind("127.0.0.1").unwrap());
    let peers = listeners.each_ref().map(|listener| listener.address().to_owned());
    // Rank 2 gets no answer from rank 1.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut wrong = peers.clone();
    wrong[1] = silent.local_addr().unwrap().to_string();
    let errors = std::thread::scope(|scope| {
        let connect = |(rank, listener)| {
            let peers = if rank == 2 { &wrong } else { &peers };
            scope.spawn(move || {
                let (generation, rank, secret) = (Generation(2), Rank(rank), &secret());
                let group = RankGroup { generation, rank, peers, secret };
                let mut member =
                    TcpCollective::connect(listener, group, options, AbortHandle::new())?;
                member.all_gather_bytes(&[]).map(|_| ())
            })
        };
        let ranks: Vec<_> = (0..).zip(listeners).map(connect).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap_err()).collect::<Vec<_>>()
    });
    assert!(matches!(errors[0], Error::LostPeer { .. }), "{errors:?}");
    assert_eq!((errors[1].unreached(), errors[2].unreached()), (&[Rank(2)][..], &[Rank(1)][..]));
}

#[test]
fn a_closed_port_is_a_lost_peer() {
    // Bound but not listening, so that no other program gets the port meanwhile.
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let held = TcpStream::from(socket);
    let lost = rank_1(&held.local_addr().unwrap().to_string(), 2).unwrap_err();
    let Error::LostPeer { rank: Rank(0), operation: "connect", source } = lost else {
        panic!("{lost}");
    };
    assert_eq!(source.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_peer_that_dies_in_the_middle_of_a_message_is_named() {
    let (address, connect) = rank_0(OPTIONS, AbortHandle::new());
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(|| all_reduce(&mut connect().unwrap(), &mut [1.0; 1000]));
        let mut rank_1 = rank_1_by_hand(&address);
        rank_1.write_all(&MessageHeader::new(0, MessageKind::AllReduce, 2, 2000).encode()).unwrap();
        rank_1.write_all(&[0; 1234]).unwrap();
        drop(rank_1);
        let lost = rank_0.join().unwrap();
        assert!(matches!(lost, Err(Error::LostPeer { rank: Rank(1), .. })), "{lost:?}");
    });
}

#[test]
fn a_wrong_length_is_reported_and_not_allocated() {
    let (address, connect) = rank_0(OPTIONS, AbortHandle::new());
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(|| all_reduce(&mut connect().unwrap(), &mut [1.0; 1000]));
        let mut rank_1 = rank_1_by_hand(&address);
        let header = MessageHeader::new(0, MessageKind::AllReduce, 2, 1 << 62);
        rank_1.write_all(&header.encode()).unwrap();
        let refused = rank_0.join().unwrap().unwrap_err();
        assert_eq!(
            refused.to_string(),
            "all_reduce: rank 1 sent all_reduce over 2 virtual ranks with 4611686018427387904 \
             bytes as message 0, expected all_reduce over 2 virtual ranks with 2000 bytes as \
             message 0"
        );
    });
}

#[test]
fn an_abort_ends_an_operation_that_waits_for_a_peer() {
    let abort = AbortHandle::new();
    let (address, connect) = rank_0(OPTIONS, abort.clone());
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(|| all_reduce(&mut connect().unwrap(), &mut [1.0; 1000]));
        let mut rank_1 = rank_1_by_hand(&address);
        // All data that rank 0 sends: from here on it only waits.
        rank_1.read_exact(&mut [0; MessageHeader::SIZE + 2000]).unwrap();
        abort.abort();
        let aborted = rank_0.join().unwrap();
        assert!(matches!(aborted, Err(Error::Aborted { .. })), "{aborted:?}");
    });
}

#[test]
fn slices_cover_every_length() {
    for len in [0, 1, 7, 1000] {
        for world_size in 1..9 {
            let mut values = vec![0.0; len];
            let slices = split_slices(&mut values, world_size);
            let lengths: Vec<usize> = slices.iter().map(|slice| slice.len()).collect();
            assert_eq!(lengths.iter().sum::<usize>(), len);
            assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 1);
        }
    }
}

#[test]
fn ranks_that_cannot_share_memory_stay_with_tcp() {
    let listener = Listener::bind("127.0.0.1").unwrap();
    let address = listener.address().to_owned();
    let peers = [address.clone(), "127.0.0.1:1".to_owned()];
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(move || {
            let (generation, rank, secret) = (Generation(2), Rank(0), &secret());
            let group = RankGroup { generation, rank, peers: &peers, secret };
            let mut rank_0 = TcpCollective::connect(listener, group, OPTIONS, AbortHandle::new())?;
            rank_0.share_memory()?;
            assert_eq!(rank_0.others_connect, LONG, "ranks of other machines may still connect");
            rank_0.all_gather_bytes(b"zero")
        });
        let mut rank_1 = rank_1_by_hand(&address);
        let send = |mut stream: &TcpStream, sequence, kind, bytes: &[u8]| {
            let header = MessageHeader::new(sequence, kind, 0, bytes.len());
            stream.write_all(&[&header.encode(), bytes].concat()).unwrap();
        };
        let mut offer = [0; MessageHeader::SIZE + shared_memory::MemoryOffer::SIZE];
        rank_1.read_exact(&mut offer).unwrap();
        assert_ne!(offer[MessageHeader::SIZE..], [0; shared_memory::MemoryOffer::SIZE]);
        send(&rank_1, 1, MessageKind::ShareMemory, &[0]);

        send(&rank_1, 2, MessageKind::AllGatherBytes, &3u64.to_le_bytes());
        send(&rank_1, 3, MessageKind::AllGatherBytes, b"one");
        let mut sent = [0; 2 * MessageHeader::SIZE + 8 + 4];
        rank_1.read_exact(&mut sent).unwrap();
        assert!(sent.ends_with(b"zero"));
        let gathered = rank_0.join().unwrap().unwrap();
        assert_eq!(gathered, [b"zero".to_vec(), b"one".to_vec()]);
    });
}

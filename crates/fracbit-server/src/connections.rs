//! Connections: how many there may be, from whom, and how long they may keep others waiting.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep, timeout};

use crate::Error;
use crate::engine::Order;
use crate::models::Engines;
use crate::tls::Tls;

/// Connections at a time.
const CONNECTIONS: usize = 512;
/// How long a connection may take for the head of a request.
const HEAD: Duration = Duration::from_secs(5);
/// Most bytes of that head.
const HEAD_BYTES: usize = 64 << 10;
/// How long a client may leave an answer lying.
const STALLED: Duration = Duration::from_secs(30);
/// How long connections have to tell their clients that all texts were given up.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// The answer to a connection too many.
const BUSY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// Connections of each peer.
#[derive(Default)]
struct Peers(Mutex<HashMap<IpAddr, usize>>);

impl Peers {
    /// Whom an address belongs to: of the sixth version a network, whose addresses are one peer's.
    fn peer(address: IpAddr) -> IpAddr {
        match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into(),
            v4 => v4,
        }
    }

    /// A connection of `address`, unless it has as many as it may.
    fn enter(
        self: &Arc<Self>,
        address: IpAddr,
        most: usize,
        permit: OwnedSemaphorePermit,
    ) -> Option<Connected> {
        let peer = Self::peer(address);
        let mut peers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = peers.entry(peer).or_default();
        // An entry that was just made is below any limit.
        (*count < most.max(1)).then(|| {
            *count += 1;
            Connected { peers: Arc::clone(self), peer, _permit: permit }
        })
    }
}

/// One connection's place.
struct Connected {
    peers: Arc<Peers>,
    peer: IpAddr,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Connected {
    fn drop(&mut self) {
        let mut peers = self.peers.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = peers.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                peers.remove(&self.peer);
            }
        }
    }
}

/// A stream that fails when the other side takes nothing for some time.
struct Patient {
    stream: TcpStream,
    patience: Duration,
    deadline: Pin<Box<Sleep>>,
    /// The deadline counts.
    stalled: bool,
}

impl Patient {
    fn new(stream: TcpStream, patience: Duration) -> Self {
        Self { stream, patience, deadline: Box::pin(sleep(patience)), stalled: false }
    }

    fn judge<T>(&mut self, wrote: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if wrote.is_ready() {
            self.stalled = false;
            return wrote;
        }
        if !self.stalled {
            self.stalled = true;
            let deadline = Instant::now() + self.patience;
            self.deadline.as_mut().reset(deadline);
        }
        self.deadline.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(wrote, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.judge(wrote, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Serves connections until `stop`, and then lets texts end within `grace`. Not axum's own loop:
/// that one sets no timer, so that clients may take for ever to say what they want.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    engines: &Engines,
    (most_of_peer, grace, tls): (usize, Duration, Option<Tls>),
    stop: impl Future<Output = ()>,
    mut failed: UnboundedReceiver<()>,
) -> Result<(), Error> {
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(HEAD_BYTES);
    let (graceful, places) = (GracefulShutdown::new(), Arc::new(Semaphore::new(CONNECTIONS)));
    let peers = Arc::new(Peers::default());
    let mut stop = std::pin::pin!(stop);
    loop {
        let accept = async {
            let permit = Arc::clone(&places).acquire_owned().await.expect("never closed");
            (listener.accept().await, permit)
        };
        tokio::select! {
            () = &mut stop => break,
            Some(()) = failed.recv() => return Err(Error::Thread),
            (accepted, permit) = accept => match accepted {
                Ok((stream, address)) => {
                    let Some(connected) = peers.enter(address.ip(), most_of_peer, permit) else {
                        tracing::debug!(%address, "has too many connections");
                        // Whoever cannot hear it now need not.
                        let _ = stream.into_std().and_then(|mut stream| io::Write::write(&mut stream, BUSY));
                        continue;
                    };
                    // Pieces of text are small and should not wait for each other.
                    let _ = stream.set_nodelay(true);
                    let service = TowerToHyperService::new(router.clone());
                    let stream = Patient::new(stream, STALLED);
                    let (http, watcher, tls) = (http.clone(), graceful.watcher(), tls.clone());
                    tokio::spawn(async move {
                        let ended = match tls {
                            None => {
                                let connection = http.serve_connection(TokioIo::new(stream), service);
                                watcher.watch(connection).await
                            }
                            Some(Tls(acceptor)) => match timeout(HEAD, acceptor.accept(stream)).await {
                                Ok(Ok(stream)) => {
                                    let connection = http.serve_connection(TokioIo::new(stream), service);
                                    watcher.watch(connection).await
                                }
                                Ok(Err(error)) => return tracing::debug!(%error, "no TLS"),
                                Err(_) => return tracing::debug!("no TLS in time"),
                            },
                        };
                        if let Err(error) = ended {
                            tracing::debug!(%error, "a connection ended");
                        }
                        drop(connected);
                    });
                }
                Err(error) => {
                    // Too many open files, for one: those of others may close.
                    tracing::warn!(%error, "accepting a connection failed");
                    sleep(Duration::from_millis(100)).await;
                }
            },
        }
    }
    drop((listener, router));
    engines.tell(|| Order::Drain);
    let mut closed = std::pin::pin!(graceful.shutdown());
    tokio::select! {
        () = &mut closed => {}
        () = sleep(grace) => {
            tracing::warn!("texts were given up: the server ends");
            engines.tell(|| Order::Stop);
            let _ = timeout(LAST_WORDS, closed).await;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_have_a_limit_each() {
        let (peers, permits) = (Arc::new(Peers::default()), Arc::new(Semaphore::new(9)));
        let enter = |address: &str| {
            let permit = Arc::clone(&permits).try_acquire_owned().expect("few of nine");
            peers.enter(address.parse().expect("an address"), 2, permit)
        };
        let two = [enter("10.0.0.1"), enter("::ffff:10.0.0.1")];
        assert!(two.iter().all(Option::is_some) && enter("10.0.0.1").is_none());
        let network = [enter("2001:db8::1"), enter("2001:db8::2")];
        assert!(network.iter().all(Option::is_some) && enter("2001:db8::3").is_none());
        assert!(enter("2001:db8:0:1::1").is_some() && enter("10.0.0.2").is_some());
        drop((two, network));
        assert!(enter("10.0.0.1").is_some() && peers.0.lock().expect("no panic").is_empty());
        assert_eq!(permits.available_permits(), 9);
    }

    #[test]
    fn who_takes_nothing_is_given_up() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            let address = listener.local_addr().expect("a bound socket");
            let silent = TcpStream::connect(address).await.expect("a listener");
            let (stream, _) = listener.accept().await.expect("a connection");
            let mut stream = Patient::new(stream, Duration::from_millis(50));
            let failed = loop {
                let wrote =
                    std::future::poll_fn(|context| Pin::new(&mut stream).poll_write(context, &[0; 1 << 16]));
                if let Err(error) = wrote.await {
                    break error;
                }
            };
            assert_eq!(failed.kind(), io::ErrorKind::TimedOut);
            drop(silent);
        });
    }
}

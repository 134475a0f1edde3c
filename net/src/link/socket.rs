//! The UDP socket below an endpoint.
//!
//! QUIC hands over up to ten datagrams at a time, which the kernel segments (GSO). One system call takes at most 64 KiB, less than
//! ten large datagrams, so such a batch is sent in parts.

use super::tuning::DATAGRAM_BYTES_MAX;
use quinn::{
    AsyncUdpSocket, Runtime, UdpPoller,
    udp::{RecvMeta, Transmit},
};
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    io::{self, IoSliceMut},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

/// The size of the buffer for datagrams that arrive while the reader is busy. The system grants no more than `net.core.rmem_max` and
/// `wmem_max`.
pub(super) const BUFFER_BYTES: usize = 4 << 20;
/// The most bytes that one system call sends or receives.
const CALL_BYTES_MAX: usize = DATAGRAM_BYTES_MAX as usize;

#[derive(Debug)]
pub(super) struct BulkSocket {
    inner: Arc<dyn AsyncUdpSocket>,
    datagram_bytes_max: u16,
}

impl BulkSocket {
    /// Binds a socket. Must be called inside a tokio runtime.
    pub(super) fn bind(addr: SocketAddr, datagram_bytes_max: u16) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))?;
        socket.set_recv_buffer_size(BUFFER_BYTES)?;
        socket.set_send_buffer_size(BUFFER_BYTES)?;
        socket.bind(&addr.into())?;
        Ok(Self { inner: quinn::TokioRuntime.wrap_udp_socket(socket.into())?, datagram_bytes_max })
    }
}

impl AsyncUdpSocket for BulkSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.inner).create_io_poller()
    }

    /// Sends a batch. If only part of it goes out, QUIC retries all of it, and the first datagrams arrive twice, which QUIC tolerates.
    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        match transmit.segment_size {
            Some(segment) if transmit.contents.len() > CALL_BYTES_MAX => {
                let part = CALL_BYTES_MAX / segment * segment;
                transmit.contents.chunks(part).try_for_each(|contents| {
                    let segment_size = (contents.len() > segment).then_some(segment);
                    self.inner.try_send(&Transmit { contents, segment_size, ..*transmit })
                })
            }
            _ => self.inner.try_send(transmit),
        }
    }

    fn poll_recv(&self, cx: &mut Context, bufs: &mut [IoSliceMut<'_>], meta: &mut [RecvMeta]) -> Poll<io::Result<usize>> {
        self.inner.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.inner.max_transmit_segments()
    }

    /// The number of the largest datagrams that receive buffers hold: as much as one call can return, coalesced (GRO).
    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments().min((u16::MAX as usize).div_ceil(self.datagram_bytes_max.into()))
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

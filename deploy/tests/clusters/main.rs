//! Whole clusters as `tidemill up` starts them: real processes, sockets and KV bytes. First: `make programs`.

mod autoscale;
mod backup;
mod calibrate;
mod chat;
mod constrained;
mod coordinators;
mod doctor;
mod exactness;
mod families;
mod lifecycle;
mod models;
mod nodes;
mod probes;
mod ranks;
mod rdma;
mod recurrent;
mod speculation;
mod stages;
mod storage;
mod support;

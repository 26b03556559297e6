// Instances by name.
#pragma once
#include "../device.cuh"

#include <map>
#include <string>

struct Instance {
    uint32_t threads;
    size_t args;
    void (*run)(const void*);
};
inline std::map<std::string, Instance>& instances() {
    static std::map<std::string, Instance> all;
    return all;
}
inline bool add(const char* name, uint32_t threads, size_t args, void (*run)(const void*)) {
    return instances().emplace(name, Instance{threads, args, run}).second;
}
